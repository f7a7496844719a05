"""Small mixtures of experts, five or six each, for tests in float64."""

from small_configs import config_of

from rotorch.models.describe import describe
from rotorch.models.hf import causal_lm
from rotorch.shard.materialize import on_meta
from rotorch.testing.subjects import compute_exactly

TINY = {"hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4, "head_dim": 8}
MIXTURES = {
    "mixtral": {"num_local_experts": 5, "output_router_logits": True, "router_aux_loss_coef": 0.5},
    "qwen3_moe": {  # a layer without experts
        "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 2,
    },
    "qwen2_moe": {  # a shared expert beside the others
        "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 16,
    },
    "gpt_oss": {"num_local_experts": 5, "num_experts_per_tok": 2},  # biases, gate and up column by column
    "deepseek_v3": {
        "n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
        "moe_intermediate_size": 24, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "head_dim": 4,
    },
}  # fmt: skip


def tiny_config(kind, **more):
    config = config_of(kind, **TINY | MIXTURES.get(kind, {}) | more)
    compute_exactly(config)
    return config


def described(config):
    with on_meta():
        return describe(causal_lm(config))
