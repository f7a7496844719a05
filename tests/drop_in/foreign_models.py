"""Models that others wrote, tiny and without dropout, each with input for a share of the ranks and a loss of a loop.

Those of packages that a plain installation lacks are made by name too, and skipped there.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB_SIZE, NUM_CLASSES, NUM_ROWS, NUM_TOKENS = 91, 5, 2, 9


@dataclass(frozen=True)
class ForeignModel:
    """A model, and what a loop does with it.

    Attributes:
        build: makes it; called under a fixed seed.
        batch: makes positional and named arguments of its forward from a generator.
        loss: of what its forward returns.
        package: what it is from.
        slow: one of those that repeat on more models what others prove.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[tuple[Any, ...], dict[str, Any]]]
    loss: Callable[[Any], Tensor]
    package: str
    slow: bool

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None


FOREIGN: dict[str, ForeignModel] = {}


def foreign(batch: Any, loss: Any, package: str = "transformers", *, slow: bool = False) -> Any:
    def enter(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        FOREIGN[build.__name__] = ForeignModel(build, batch, loss, package, slow)
        return build

    return enter


# ---- input


def tokens(generator: torch.Generator) -> Any:
    ids = torch.randint(2, VOCAB_SIZE, (NUM_ROWS, NUM_TOKENS), generator=generator)
    return (), {"input_ids": ids, "labels": ids.clone()}


def tokens_alone(generator: torch.Generator) -> Any:
    return (tokens(generator)[1]["input_ids"],), {}


def source_and_target(generator: torch.Generator) -> Any:
    given, wanted = tokens(generator)[1]["input_ids"], tokens(generator)[1]["input_ids"][:, :6].clone()
    wanted[0, -2:] = -100
    return (), {"input_ids": given, "labels": wanted}


def normal(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def spectrum_and_target(generator: torch.Generator) -> Any:
    features = normal(NUM_ROWS, 8, 24, generator=generator)
    return (), {"input_features": features, "labels": source_and_target(generator)[1]["labels"]}


def image(size: int) -> Any:
    def batch(generator: torch.Generator) -> Any:
        return (normal(NUM_ROWS, 3, size, size, generator=generator),), {}

    return batch


def image_and_text(generator: torch.Generator) -> Any:
    ids = tokens(generator)[1]["input_ids"].clamp(max=VOCAB_SIZE - 2)
    ids[:, 1:5] = VOCAB_SIZE - 1  # an image of 2 by 2 patches
    pixels = normal(NUM_ROWS, 3, 16, 16, generator=generator)
    return (), {"input_ids": ids, "pixel_values": pixels, "labels": ids.clone(), "attention_mask": ids.ge(0).long()}


def image_beside_text(generator: torch.Generator) -> Any:
    ids, pixels = tokens(generator)[1]["input_ids"], normal(NUM_ROWS, 3, 16, 16, generator=generator)
    return (), {"input_ids": ids, "attention_mask": ids.ge(0).long(), "pixel_values": pixels, "return_loss": True}


def noise_and_time(generator: torch.Generator) -> Any:
    noise = normal(NUM_ROWS, 4, 16, 16, generator=generator)
    times = torch.randint(100, (NUM_ROWS,), generator=generator)
    return (noise, times), {}


def noise_time_and_class(generator: torch.Generator) -> Any:
    (noise, times), _ = noise_and_time(generator)
    classes = torch.randint(NUM_CLASSES, (NUM_ROWS,), generator=generator)
    return (noise[..., :8, :8],), {"timestep": times, "class_labels": classes}


def noise_time_and_text(generator: torch.Generator) -> Any:
    (noise, times), _ = noise_and_time(generator)
    return (noise, times), {"encoder_hidden_states": normal(NUM_ROWS, 5, 12, generator=generator)}


# ---- losses


def own_loss(output: Any) -> Tensor:
    loss: Tensor = output.loss
    return loss


def class_loss(output: Any) -> Tensor:
    """Cross entropy with classes that follow from the row."""
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits, torch.arange(len(logits)) % NUM_CLASSES)


def token_loss(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), torch.arange(logits.shape[0] * logits.shape[1]) % VOCAB_SIZE)


def denoising_loss(output: Any) -> Tensor:
    return (output.sample - 0.5).pow(2).mean()


# ---- plain code, as in repositories of one file


@foreign(tokens_alone, token_loss, "torch")
def nano_gpt() -> nn.Module:
    """A GPT in plain torch: query, key and value in one matrix, the head tied to the embedding."""

    class Attention(nn.Module):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.n_head, self.n_embd = heads, width

        def forward(self, x: Tensor) -> Tensor:
            B, T, C = x.size()
            q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
            q, k, v = (y.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for y in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            mixed: Tensor = self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))
            return mixed

    class Block(nn.Module):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(width), Attention(width, heads), nn.LayerNorm(width)
            self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)})

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attn(self.ln_1(x))
            more: Tensor = self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x))))
            return x + more

    class GPT(nn.Module):
        def __init__(self, width: int = 24, heads: int = 4) -> None:
            super().__init__()
            self.transformer = nn.ModuleDict(
                {
                    "wte": nn.Embedding(VOCAB_SIZE, width),
                    "wpe": nn.Embedding(16, width),
                    "h": nn.ModuleList(Block(width, heads) for _ in range(2)),
                    "ln_f": nn.LayerNorm(width),
                }
            )
            self.lm_head = nn.Linear(width, VOCAB_SIZE, bias=False)
            self.transformer["wte"].weight = self.lm_head.weight

        def forward(self, idx: Tensor) -> Tensor:
            x = self.transformer["wte"](idx) + self.transformer["wpe"](torch.arange(idx.size(1)))
            for block in self.transformer["h"]:
                x = block(x)
            logits: Tensor = self.lm_head(self.transformer["ln_f"](x))
            return logits

    return GPT()


@foreign(tokens_alone, token_loss, "torch")
def a_block_whose_part_is_used_outside() -> nn.Module:
    """As in diffusion transformers: the model calls a module of its first block itself."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.condition, self.mlp = nn.Linear(width, width), nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            more: Tensor = self.mlp(F.silu(self.condition(x)))
            return x + more

    class Model(nn.Module):
        def __init__(self, width: int = 16) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(VOCAB_SIZE, width), nn.Linear(width, VOCAB_SIZE)
            self.blocks = nn.ModuleList(Block(width) for _ in range(2))

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x)
            first = self.blocks[0]
            logits: Tensor = self.head(x * first.condition(x))
            return logits

    return Model()


# ---- transformers


@foreign(tokens, own_loss)
def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB_SIZE, n_positions=16, n_embd=24, n_layer=2, n_head=4, **none))


@foreign(source_and_target, own_loss)
def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 2, "num_heads": 4}
    config = T5Config(vocab_size=VOCAB_SIZE, dropout_rate=0.0, decoder_start_token_id=0, **sizes)
    return T5ForConditionalGeneration(config)


@foreign(spectrum_and_target, own_loss)
def whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes = {"d_model": 24, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "num_mel_bins": 8}
    places = {"max_source_positions": 12, "max_target_positions": 12}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 0}
    none = {"suppress_tokens": None, "begin_suppress_tokens": None, "dropout": 0.0}
    config = WhisperConfig(vocab_size=VOCAB_SIZE, **layers, **sizes, **places, **ids, **none)
    return WhisperForConditionalGeneration(config)


@foreign(tokens, own_loss)
def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(vocab_size=VOCAB_SIZE, max_position_embeddings=16, **sizes, **none))


@foreign(image_and_text, own_loss)
def llava() -> nn.Module:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    shared = {"num_hidden_layers": 2, "num_attention_heads": 4}
    seen = CLIPVisionConfig(hidden_size=16, intermediate_size=24, image_size=16, patch_size=8, **shared)
    read = LlamaConfig(vocab_size=VOCAB_SIZE, hidden_size=24, intermediate_size=40, num_key_value_heads=2, **shared)
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=seen, text_config=read, image_token_id=VOCAB_SIZE - 1)
    )


@foreign(image_beside_text, own_loss)
def clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    shared = {"num_hidden_layers": 2, "num_attention_heads": 4, "projection_dim": 12}
    read = {"vocab_size": VOCAB_SIZE, "hidden_size": 24, "intermediate_size": 40, "max_position_embeddings": 16}
    seen = {"hidden_size": 16, "intermediate_size": 24, "image_size": 16, "patch_size": 8}
    config = CLIPConfig(
        text_config={**read, **shared, "eos_token_id": 1}, vision_config={**seen, **shared}, projection_dim=12
    )
    return CLIPModel(config)


@foreign(tokens, own_loss)
def mamba() -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=16, state_size=4, num_hidden_layers=2)
    return MambaForCausalLM(config)


@foreign(tokens, own_loss)
def mamba2() -> nn.Module:
    from transformers import Mamba2Config, Mamba2ForCausalLM

    sizes = {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 8, "n_groups": 2}
    return Mamba2ForCausalLM(Mamba2Config(vocab_size=VOCAB_SIZE, chunk_size=4, **sizes))


@foreign(tokens, own_loss)
def mixture_of_experts() -> nn.Module:
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    shared = {"intermediate_size": 40, "shared_expert_intermediate_size": 20, "output_router_logits": True}
    config = Qwen2MoeConfig(vocab_size=VOCAB_SIZE, **sizes, **experts, **shared)
    config._experts_implementation = "eager"  # torch's grouped product takes no float64
    return Qwen2MoeForCausalLM(config)


@foreign(image(32), class_loss)
def resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[16, 24], depths=[1, 2], num_labels=NUM_CLASSES)
    return ResNetForImageClassification(config)


@foreign(image(32), class_loss)
def swin() -> nn.Module:
    from transformers import SwinConfig, SwinForImageClassification

    sizes = {"image_size": 32, "patch_size": 2, "embed_dim": 12, "depths": [2, 2], "num_heads": [2, 4]}
    config = SwinConfig(window_size=4, drop_path_rate=0.0, num_labels=NUM_CLASSES, **sizes)
    return SwinForImageClassification(config)


# ---- timm and diffusers


@foreign(image(16), class_loss, "timm")
def timm_vit() -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 4}
    return VisionTransformer(num_classes=NUM_CLASSES, **sizes)


@foreign(image(32), class_loss, "timm")
def timm_convnext() -> nn.Module:
    from timm.models.convnext import ConvNeXt

    return ConvNeXt(num_classes=NUM_CLASSES, depths=(1, 1, 1, 1), dims=(8, 12, 16, 20))


@foreign(noise_time_and_class, denoising_loss, "diffusers")
def diffusers_dit() -> nn.Module:
    from diffusers import DiTTransformer2DModel

    sizes = {"num_attention_heads": 4, "attention_head_dim": 6, "in_channels": 4, "num_layers": 2, "sample_size": 8}
    model = DiTTransformer2DModel(num_embeds_ada_norm=NUM_CLASSES, norm_num_groups=4, **sizes)
    for block in model.transformer_blocks:
        block.norm1.emb.class_embedder.dropout_prob = 0.0
    return model


@foreign(noise_and_time, denoising_loss, "diffusers")
def diffusers_unet() -> nn.Module:
    from diffusers import UNet2DModel

    sizes = {"in_channels": 4, "out_channels": 4, "sample_size": 16, "block_out_channels": (8, 16)}
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    return UNet2DModel(layers_per_block=1, norm_num_groups=4, attention_head_dim=4, **sizes, **blocks)


@foreign(noise_time_and_text, denoising_loss, "diffusers")
def diffusers_unet_with_text() -> nn.Module:
    from diffusers import UNet2DConditionModel

    sizes = {"in_channels": 4, "out_channels": 4, "sample_size": 16, "block_out_channels": (8, 16)}
    blocks = {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    heads = {"cross_attention_dim": 12, "attention_head_dim": 4, "norm_num_groups": 4}
    return UNet2DConditionModel(layers_per_block=1, **sizes, **blocks, **heads)
