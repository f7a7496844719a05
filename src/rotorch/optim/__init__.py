"""Optimizers for weights of which every rank has a part: what needs whole matrices gets them, one at a time."""

from rotorch.optim.adafactor import Adafactor
from rotorch.optim.adamw import AdamW
from rotorch.optim.lion import Lion
from rotorch.optim.muon import Muon, is_hidden_matrix, muon_groups
from rotorch.optim.whole_matrices import WholeMatrices
from rotorch.shard.sharded_weight import weight_of

__all__ = ["Adafactor", "AdamW", "Lion", "Muon", "WholeMatrices", "is_hidden_matrix", "muon_groups", "weight_of"]
