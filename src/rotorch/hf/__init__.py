"""Trainers of Hugging Face over parallel models: transformers' `Trainer`, and what TRL makes of it.

class SFT(rotorch.hf.TrainerMixin, SFTTrainer): ...
SFT(model=..., layout="rtp=8", args=..., train_dataset=...).train()
"""

from rotorch.hf.trainer import TrainerMixin

__all__ = ["TrainerMixin"]
