"""Selection of the weights that weight decay acts on: matrices, by the kind of weight.

[Note: what is decayed]
    The number of dims does not tell: GPT-OSS has its experts' biases in matrices, Cohere a norm's scales per head. A
    weight is decayed if it is a matrix, a stack of them (experts), the kernel of a convolution, or a table of
    embeddings (of tokens or positions, learnt queries too). Not decayed are weights that add or scale by element:

    - weights of a norm (a module whose class is called `*Norm*`),
    - biases and scales by their names (`bias`, `down_proj_bias`, `bias_k`, `scale`), also a table of biases for
      relative positions (`relative_attention_bias.weight`),
    - vectors, however many dims of length 1 they have (RWKV's `time_mix_key`, gates, sinks, a class token), unless a
      linear layer, convolution or embedding happens to have that shape,
    - a state space's decay rates, steps and skips (`A_log`, `D`, `dt_bias`).

    Adapters are linear layers. All of this is known from the model's code: no rank's share of a weight matters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from torch import nn

from rotorch.core.spec import Weight

_LAYERS = (
    nn.Linear,
    nn.Embedding,
    nn.EmbeddingBag,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
_NAMED_SO = re.compile(r"(\w+_)?(bias|biases|scale|scales)|bias_\w+|A_log|D|dt_bias")


def is_decayed(module: nn.Module, name: str, *, shape: Sequence[int]) -> bool:
    """True if weight decay acts on a weight (see [Note: what is decayed]). Local; the same on every rank.

    Args:
        module: the model, under any layout.
        name: of the weight in it.
        shape: of the whole weight.
    """
    path, _, attribute = name.rpartition(".")
    holder = module.get_submodule(path)
    is_norm = any("Norm" in cls.__name__ for cls in type(holder).__mro__)
    named = attribute if not isinstance(holder, nn.Embedding) else path.rpartition(".")[2]
    if len(shape) < 2 or is_norm or _NAMED_SO.fullmatch(named):
        return False
    is_vector = sum(size > 1 for size in shape) < 2
    return isinstance(holder, _LAYERS) or not is_vector


def num_decayed_parameters(module: nn.Module, weights: Iterable[Weight]) -> int:
    """Number of a model's trained parameters that weight decay acts on (see [Note: what is decayed])."""
    return sum(w.numel for w in weights if w.trained and is_decayed(module, w.name, shape=w.shape))
