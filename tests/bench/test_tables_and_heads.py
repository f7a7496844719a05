"""Predicted peaks that a table of words or a head decides, held to those of real steps on small models."""

import pytest
import torch
from real_peaks import peak_of, planned
from torch.nn import functional as F

from rotorch.bench.task import Task
from rotorch.models.hf import config_from_dict
from rotorch.planner.search import judged
from rotorch.strategies import batch_ranks, num_ranks, parse_parallel
from rotorch.testing.ranks import run_ranks
from rotorch.traced.backwards import Backwards
from rotorch.traced.live_storages import LiveStorages

SHAPES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
SOFT_CAPS = {"model_type": "gemma2", **SHAPES}
SCALED = {"model_type": "granite", **SHAPES, "tie_word_embeddings": False}
TIED = {"model_type": "qwen3", **SHAPES, "tie_word_embeddings": True}


def measured_and_predicted(model, layout, *, vocabulary, rows, tokens, precision, accumulation=1):
    """Peak of a real step, the least of several, and the one that is predicted."""
    config = config_from_dict(model | {"vocab_size": vocabulary}, source="")
    strategies = parse_parallel(layout)
    task = Task(
        name="tiny",
        model=config.to_dict(),
        vocabulary=vocabulary,
        num_ranks=num_ranks(strategies),
        micro_batch=rows * batch_ranks(strategies) // num_ranks(strategies),
        accumulation=accumulation,
        sequence_length=tokens,
        precision=precision,
    )
    measured = max(run_ranks(peak_of, task, layout, 2, num_ranks=num_ranks(strategies)))
    all_rows = rows * accumulation * batch_ranks(strategies)
    asked = planned(config, rows=all_rows, tokens=tokens, precision=precision)
    return measured, judged(asked, layout, rows=rows, accumulation=accumulation).memory.total_bytes


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "layout",
    ["rtp=2", "rtp=2[recompute=none]", "rtp=2[recompute=slice]", "rtp=2[transport=send_receive]", "megatron=2"],
)
@pytest.mark.parametrize("model", [SOFT_CAPS, SCALED], ids=["soft caps", "scale"])
def test_what_is_made_of_logits_before_the_loss_counts_for_each_slice(model, layout, precision):
    """Operations between the head and the loss run again on each slice of the vocabulary, and keep tensors as large."""
    measured, predicted = measured_and_predicted(model, layout, vocabulary=8192, rows=4, tokens=64, precision=precision)
    assert predicted == pytest.approx(measured, rel=0.0138)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("layout", ["single", "ddp=2"])
def test_both_gradients_of_a_tied_table_count(layout, accumulation, precision):
    """The head's waits for the table's own, to the end of a backward, which is the highest moment of so few tokens."""
    measured, predicted = measured_and_predicted(
        TIED, layout, vocabulary=8192, rows=1, tokens=8, precision=precision, accumulation=accumulation
    )
    assert predicted == pytest.approx(measured, rel=0.0138)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("layout", ["ddp=2", "ddp=2[recompute=block]"])
def test_gradients_that_are_put_side_by_side_count_beside_those_of_the_pass(layout, accumulation):
    model = {"model_type": "llama", **SHAPES, "hidden_size": 128, "tie_word_embeddings": False}
    measured, predicted = measured_and_predicted(
        model, layout, vocabulary=512, rows=1, tokens=8, precision="bfloat16", accumulation=accumulation
    )
    assert predicted == pytest.approx(measured, rel=0.0138)


class Head(torch.nn.Module):
    """A head whose output is a tensor, or the first of several."""

    def __init__(self, several):
        super().__init__()
        self.several = several

    def forward(self, x):
        return (2 * x, x) if self.several else 2 * x


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(
    ("made", "found"),
    [
        (lambda z: z, (0, 0)),
        (lambda z: z.float().view(-1, 8), (0, 0)),
        (lambda z: z / 4, (1, 0)),
        (lambda z: 4 * torch.tanh(z / 4), (3, 1)),
    ],
)
def test_operations_between_a_head_and_its_loss_are_found_whatever_is_added_to_the_loss(several, made, found):
    head, backwards = Head(several), Backwards(LiveStorages())
    backwards.watch_head(head)
    hidden = torch.randn(4, 8, requires_grad=True)
    output = head(hidden)
    logits = output[0] if several else output
    loss = hidden.square().sum() + F.cross_entropy(made(logits).view(-1, 8), torch.zeros(4, dtype=torch.long))
    assert backwards.on_logits(loss) == found
    assert backwards.on_logits(loss) == (0, 0)  # of a forward that has not run


def test_nothing_is_known_of_a_loss_that_is_no_cross_entropy():
    head, backwards = Head(several=False), Backwards(LiveStorages())
    backwards.watch_head(head)
    loss = torch.tanh(head(torch.randn(4, 8, requires_grad=True))).logsumexp(-1).sum()
    assert backwards.on_logits(loss) == (0, 0)
