"""More models that others wrote: see foreign_models.py. They repeat on other code what those of that file prove."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from foreign_models import (
    NUM_CLASSES,
    NUM_ROWS,
    VOCAB_SIZE,
    class_loss,
    denoising_loss,
    foreign,
    image,
    normal,
    own_loss,
    source_and_target,
    token_loss,
    tokens,
    tokens_alone,
)
from torch import Tensor, nn

SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
more = partial(foreign, slow=True)


def wave(generator: torch.Generator) -> Any:
    labels = torch.randint(1, VOCAB_SIZE, (NUM_ROWS, 4), generator=generator)
    return (), {"input_values": normal(NUM_ROWS, 400, generator=generator), "labels": labels}


def image_and_map(generator: torch.Generator) -> Any:
    labels = torch.randint(NUM_CLASSES, (NUM_ROWS, 32, 32), generator=generator)
    return (), {"pixel_values": normal(NUM_ROWS, 3, 32, 32, generator=generator), "labels": labels}


def series(generator: torch.Generator) -> Any:
    return (normal(NUM_ROWS, 9, 4, generator=generator),), {}


def noise_and_two_texts(*shape: int) -> Any:
    def batch(generator: torch.Generator) -> Any:
        given = {
            "hidden_states": normal(NUM_ROWS, *shape, generator=generator),
            "encoder_hidden_states": normal(NUM_ROWS, 5, 16, generator=generator),
            "pooled_projections": normal(NUM_ROWS, 12, generator=generator),
            "timestep": torch.rand(NUM_ROWS, generator=generator, dtype=torch.float64),
        }
        places = {"img_ids": torch.zeros(shape[0], 3), "txt_ids": torch.zeros(5, 3)}
        return (), given | (places if len(shape) == 2 else {})

    return batch


# ---- torch


@more(tokens_alone, token_loss, "torch")
def recurrent() -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(VOCAB_SIZE, 16), nn.Linear(16, VOCAB_SIZE)
            self.layers = nn.LSTM(16, 16, 2, batch_first=True)

        def forward(self, ids: Tensor) -> Tensor:
            logits: Tensor = self.head(self.layers(self.embed(ids))[0])
            return logits

    return Model()


@more(tokens_alone, token_loss, "torch")
def encoder_and_decoder_of_torch() -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(VOCAB_SIZE, 16), nn.Linear(16, VOCAB_SIZE)
            self.layers = nn.Transformer(16, 4, 2, 2, 24, dropout=0.0, batch_first=True)

        def forward(self, ids: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=torch.float64)
            logits: Tensor = self.head(self.layers(self.embed(ids), self.embed(ids.flip(1)), tgt_mask=mask))
            return logits

    return Model()


@more(image(16), class_loss, "torch")
def normed_weights() -> nn.Module:
    """A critic whose weights are computed from others: spectral norms and weight norms."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            norms = nn.utils.parametrizations
            self.first = norms.spectral_norm(nn.Conv2d(3, 8, 3, 2))
            self.second, self.head = norms.weight_norm(nn.Conv2d(8, 8, 3, 2)), nn.Linear(72, NUM_CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(F.relu(self.second(F.relu(self.first(x)))).flatten(1))
            return logits

    return Model()


# ---- transformers


@more(source_and_target, own_loss)
def bart() -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes = {"d_model": 24, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "max_position_embeddings": 32}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 1}
    config = BartConfig(vocab_size=VOCAB_SIZE, dropout=0.0, forced_eos_token_id=None, **layers, **sizes, **ids)
    return BartForConditionalGeneration(config)


@more(tokens, own_loss)
def modern_bert() -> nn.Module:
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "cls_token_id": 1, "sep_token_id": 1}
    windows = {"max_position_embeddings": 32, "local_attention": 4, "global_attn_every_n_layers": 2}
    return ModernBertForMaskedLM(ModernBertConfig(vocab_size=VOCAB_SIZE, **SIZES, **ids, **windows))


@more(tokens, own_loss)
def deberta_v2() -> nn.Module:
    from transformers import DebertaV2Config, DebertaV2ForMaskedLM

    places = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4}
    config = DebertaV2Config(vocab_size=VOCAB_SIZE, max_position_embeddings=16, **SIZES, **NO_DROPOUT, **places)
    return DebertaV2ForMaskedLM(config)


@more(tokens, own_loss)
def albert() -> nn.Module:
    """All layers are one."""
    from transformers import AlbertConfig, AlbertForMaskedLM

    shared = {"num_hidden_groups": 1, "embedding_size": 12, "classifier_dropout_prob": 0.0}
    config = AlbertConfig(vocab_size=VOCAB_SIZE, max_position_embeddings=16, **SIZES, **NO_DROPOUT, **shared)
    return AlbertForMaskedLM(config)


@more(tokens, own_loss)
def deepseek_v3() -> nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    experts = {"moe_intermediate_size": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2}
    experts |= {"topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
    latent = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "qk_nope_head_dim": 6}
    config = DeepseekV3Config(vocab_size=VOCAB_SIZE, num_key_value_heads=4, **SIZES, **experts, **latent)
    config._experts_implementation = "eager"
    return DeepseekV3ForCausalLM(config)


@more(tokens, own_loss)
def gpt_oss() -> nn.Module:
    from transformers import GptOssConfig, GptOssForCausalLM

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4}
    config = GptOssConfig(vocab_size=VOCAB_SIZE, num_key_value_heads=2, head_dim=6, **SIZES, **experts)
    config._experts_implementation = config._attn_implementation = "eager"
    return GptOssForCausalLM(config)


@more(tokens, own_loss)
def zamba2() -> nn.Module:
    """State spaces, and one attention that several layers share."""
    from transformers import Zamba2Config, Zamba2ForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4}
    states = {"mamba_d_state": 4, "mamba_headdim": 8, "mamba_ngroups": 1, "n_mamba_heads": 4, "chunk_size": 4}
    shared = {"layers_block_type": ["mamba", "hybrid", "mamba"], "num_mem_blocks": 1, "adapter_rank": 4}
    config = Zamba2Config(vocab_size=VOCAB_SIZE, intermediate_size=24, pad_token_id=0, **sizes, **states, **shared)
    return Zamba2ForCausalLM(config)


@more(tokens, own_loss)
def jamba() -> nn.Module:
    """State spaces, attention and experts in turn."""
    from transformers import JambaConfig, JambaForCausalLM

    turns = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
    states = {"mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    config = JambaConfig(vocab_size=VOCAB_SIZE, **SIZES, **turns, **states, **experts)
    config._experts_implementation = "eager"
    return JambaForCausalLM(config)


@more(wave, own_loss)
def wav2vec2() -> nn.Module:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    none = dict.fromkeys(["hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout"], 0.0)
    none |= {"final_dropout": 0.0, "layerdrop": 0.0, "apply_spec_augment": False}
    heard = {"conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 4), "pad_token_id": 0}
    places = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "ctc_loss_reduction": "mean"}
    return Wav2Vec2ForCTC(Wav2Vec2Config(vocab_size=VOCAB_SIZE, **SIZES, **none, **heard, **places))


@more(image_and_map, own_loss)
def segformer() -> nn.Module:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    sizes = {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16]}
    sizes |= {"patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]}
    none = {**NO_DROPOUT, "classifier_dropout_prob": 0.0, "drop_path_rate": 0.0}
    config = SegformerConfig(decoder_hidden_size=16, num_labels=NUM_CLASSES, **sizes, **none)
    return SegformerForSemanticSegmentation(config)


@more(series, own_loss)
def patch_tst() -> nn.Module:
    from transformers import PatchTSTConfig, PatchTSTForPretraining

    sizes = {"d_model": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 24, "num_input_channels": 4}
    patches = {"context_length": 9, "patch_length": 3, "patch_stride": 3, "random_mask_ratio": 0.0}
    none = {"attention_dropout": 0.0, "ff_dropout": 0.0, "head_dropout": 0.0}
    return PatchTSTForPretraining(PatchTSTConfig(do_mask_input=True, **sizes, **patches, **none))


# ---- timm, torchvision, diffusers


@more(image(32), class_loss, "timm")
def timm_mixer() -> nn.Module:
    from timm.models.mlp_mixer import MlpMixer

    return MlpMixer(NUM_CLASSES, img_size=32, patch_size=8, num_blocks=2, embed_dim=24)


@more(image(32), class_loss, "timm")
def timm_swin() -> nn.Module:
    from timm.models.swin_transformer import SwinTransformer

    sizes = {"img_size": 32, "window_size": 4, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4)}
    return SwinTransformer(patch_size=4, num_classes=NUM_CLASSES, drop_path_rate=0.0, **sizes)


@more(image(32), class_loss, "torchvision")
def torchvision_resnet() -> nn.Module:
    from torchvision.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=NUM_CLASSES)


@more(image(32), class_loss, "torchvision")
def torchvision_densenet() -> nn.Module:
    """Its layers compute their insides again in backward, which writes running statistics a second time."""
    from torchvision.models import DenseNet

    return DenseNet(4, (2, 2), 8, num_classes=NUM_CLASSES, memory_efficient=True)


@more(image(16), denoising_loss, "diffusers")
def diffusers_vae() -> nn.Module:
    from diffusers import AutoencoderKL

    down, up = ("DownEncoderBlock2D",) * 2, ("UpDecoderBlock2D",) * 2
    blocks = {"down_block_types": down, "up_block_types": up, "block_out_channels": (8, 16)}
    return AutoencoderKL(norm_num_groups=4, latent_channels=2, **blocks)


@more(noise_and_two_texts(4, 8, 8), denoising_loss, "diffusers")
def diffusers_sd3() -> nn.Module:
    from diffusers import SD3Transformer2DModel

    sizes = {"sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 2}
    heads = {"attention_head_dim": 6, "num_attention_heads": 4, "caption_projection_dim": 24, "pos_embed_max_size": 8}
    return SD3Transformer2DModel(joint_attention_dim=16, pooled_projection_dim=12, **sizes, **heads)


@more(noise_and_two_texts(16, 4), denoising_loss, "diffusers")
def diffusers_flux() -> nn.Module:
    from diffusers import FluxTransformer2DModel

    sizes = {"patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 2, "axes_dims_rope": (2, 2, 4)}
    heads = {"attention_head_dim": 8, "num_attention_heads": 2, "joint_attention_dim": 16}
    return FluxTransformer2DModel(pooled_projection_dim=12, **sizes, **heads)
