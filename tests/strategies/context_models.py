"""Small models whose sequences ranks share: grouped heads, norms of heads, windows, soft caps, sinks."""

import torch
from small_configs import config_of

from rotorch.models.hf import causal_lm

TINY = {"hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 8}
MIXED = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
MODELS = {
    "llama": {},
    "qwen3": {"head_dim": 8},  # norms of heads
    "mistral": {"sliding_window": 5},
    "gemma3_text": {"head_dim": 8, **MIXED},
    "gemma2": {"head_dim": 8, **MIXED},  # soft caps
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, **MIXED},  # sinks
    "cohere2": {"head_dim": 8, **MIXED},  # layers without positions
    "phi3": {},  # heads fused in one matrix
}


def tiny_config(kind, **more):
    return config_of(kind, **TINY, **MODELS.get(kind, {}), **more)


def module_of(config):
    """In float64, the same in every process."""
    config.use_cache = False
    torch.manual_seed(0)
    return causal_lm(config).double().train()
