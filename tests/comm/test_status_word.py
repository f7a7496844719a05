"""A rank's position in a step, written as a number and read back as words."""

import mmap

import pytest

from rotorch.comm.status_word import STATUS_BYTES, Operation, StatusWord, at, describe_status

NAMES = ["model.embed_tokens", "model.layers.0.mlp"]


@pytest.mark.parametrize(
    ("now", "micro_batch", "peer", "words"),
    [
        (0, 0, 0, ""),
        (at(Operation.SLICE_BACKWARD, unit=1, part=3), 0, 0, "at slice 3 of 'model.layers.0.mlp', backward"),
        (at(Operation.SLICE_FORWARD, unit=0), 2, 4, "micro-batch 2, at slice 0 of 'model.embed_tokens', forward"),
        (at(Operation.AWAIT_SLICE, unit=1, part=2), 0, 3, "waiting for slice 2 of 'model.layers.0.mlp' from rank 2"),
        (at(Operation.AWAIT_GRADIENT, unit=7, part=1), 0, 0, "waiting for the gradient of slice 1 of unit 7"),
        (at(Operation.AWAIT_STAGE, part=65535), 1, 1, "micro-batch 1, waiting for what stage 65535 sends from rank 0"),
        (1 << 60, 0, 0, ""),
    ],
)
def test_words(now, micro_batch, peer, words):
    assert describe_status(now, micro_batch, peer, names=NAMES) == words


def test_every_operation_has_words():
    assert all(describe_status(at(o), 0, 0, names=NAMES) for o in Operation if o)


def test_others_see_an_assignment_at_once():
    memory = mmap.mmap(-1, 64 + STATUS_BYTES)
    place = StatusWord.from_buffer(memory, 64)
    place.now = at(Operation.SLICE_FORWARD, unit=70_000, part=9)
    place.peer = 5
    seen = StatusWord.from_buffer_copy(memory, 64)
    assert (seen.now, seen.micro_batch, seen.peer) == (place.now, 0, 5)
    assert describe_status(seen.now, 0, 0, names=[]) == "at slice 9 of unit 70000, forward"
