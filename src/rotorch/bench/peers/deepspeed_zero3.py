"""DeepSpeed ZeRO-3: weights, gradients and optimizer state cut over the ranks, gathered layer by layer.

[Note: settings]
    DeepSpeed's own defaults are for models of billions of weights: a buffer of 5e8 elements for gradients, and nothing
    freed below 1e5 elements. So buckets and thresholds follow the hidden size, as Hugging Face's Trainer sets them
    where a configuration says "auto". Still, what is gathered stays gathered while fewer than 1e9 elements are live,
    which a small model never reaches. `lean` sets that and the thresholds to nothing: so a model would be treated that
    needs it. Gradients are not clipped unless the task says so; by itself DeepSpeed clips at 1.

[Note: what it holds]
    Every weight has a partition (`ds_tensor`), which the optimizer updates; the weight itself has memory only while it
    is gathered. Both count.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor, nn

from rotorch.bench.contender import PlainLoop, whole_model
from rotorch.bench.task import Task
from rotorch.parallel_model import causal_lm_loss


class DeepSpeedZero3(PlainLoop):
    """A model in DeepSpeed's engine.

    Args:
        task: the task to train.
        rank: this one.
        lean: keep no weight gathered (see [Note: settings]).
    """

    def __init__(self, task: Task, *, rank: int, lean: bool = False) -> None:
        import deepspeed

        warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)  # at every gather
        super().__init__(task, module=whole_model(task), shares=[rank])
        self._engine, self._zero, *_ = deepspeed.initialize(
            model=self.module,
            optimizer=self.optimizer,
            dist_init_required=False,
            config={
                "train_micro_batch_size_per_gpu": task.micro_batch,
                "gradient_accumulation_steps": task.accumulation,
                "gradient_clipping": task.optimizer.clip_norm,
                "zero_optimization": _zero_settings(self.module, lean=lean),
                "torch_autocast": {"enabled": task.half_dtype is not None, "dtype": "bfloat16"},
                "steps_per_print": 1 << 30,
            },
        )

    def _pass(self, batch: dict[str, Tensor], *, num_targets: int) -> float:
        # The engine divides by the number of micro-batches, so each brings its own mean.
        own = num_targets // self._task.accumulation
        loss = causal_lm_loss(self._engine, batch, own)
        self._engine.backward(loss)
        if not self._engine.is_gradient_accumulation_boundary():
            self._engine.step()  # only counts the micro-batch
        return float(loss.detach()) / self._task.accumulation

    def update(self) -> None:
        """The engine clips, steps and clears."""
        self._engine.step()

    def weights(self) -> list[Tensor]:
        parameters: list[Any] = list(self.module.parameters())
        return [p.ds_tensor.detach() for p in parameters] + [p.detach() for p in parameters if p.numel()]

    def gradients(self) -> list[Tensor]:
        averaged = self._zero.averaged_gradients.values()
        return [gradient for group in averaged if group for gradient in group]

    def optimizer_state(self) -> list[Tensor]:
        states = self._zero.optimizer.state.values()
        return [value for state in states for value in state.values() if isinstance(value, Tensor)]

    def close(self) -> None:
        self._engine.destroy()


def _zero_settings(module: nn.Module, *, lean: bool) -> dict[str, int]:
    """See [Note: settings]."""
    hidden: int = module.config.get_text_config().hidden_size
    settings = {
        "stage": 3,
        "reduce_bucket_size": hidden * hidden,
        "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
        "stage3_param_persistence_threshold": 10 * hidden,
    }
    if lean:
        settings |= {
            "stage3_max_live_parameters": 1,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": 0,
        }
    return settings
