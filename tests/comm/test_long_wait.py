"""Ranks that wait long for others say so, once for each wait, and short waits say nothing."""

import logging
import time

import pytest
import torch
from torch import nn

import rotorch
from rotorch.comm import long_wait
from rotorch.parallelize import load_step_code
from rotorch.testing.ranks import run_ranks


def until(condition):
    while not condition():
        time.sleep(0.01)


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(long_wait, "SAYS_AFTER_S", 0.0)
    monkeypatch.setattr(long_wait, "_LOOKS_EVERY_S", 0.01)
    monkeypatch.setattr(long_wait, "_lookout", long_wait._Lookout())


def test_a_long_wait_is_said_once(soon, caplog):
    for text in ("first", "second"):
        with long_wait.saying_if_long(text):
            until(lambda text=text: text in caplog.messages)
            time.sleep(0.1)
    assert caplog.messages == ["first", "second"]


def test_a_short_wait_is_not(caplog):
    with long_wait.saying_if_long("of a moment"):
        pass
    assert not caplog.messages


class Said(logging.Handler):
    """Leaves what is logged first in a file, where another rank finds it."""

    def __init__(self, path):
        super().__init__()
        self._path = path

    def emit(self, record):
        if self._path.exists():
            return
        self._path.with_suffix(".new").write_text(record.getMessage())
        self._path.with_suffix(".new").rename(self._path)


def calls_while_the_other_does_something_else(path):
    long_wait.SAYS_AFTER_S, long_wait._LOOKS_EVERY_S = 0.0, 0.01
    model, rank = rotorch.parallelize(nn.Linear(2, 2), "ddp=2", device="cpu"), torch.distributed.get_rank()
    if rank == 0:
        logging.getLogger("rotorch").addHandler(Said(path))
    else:
        until(path.exists)
    model(torch.ones(1, 2))
    return path.read_text()


def test_a_rank_that_calls_the_model_alone_says_so(tmp_path):
    load_step_code(["ddp"])
    for said in run_ranks(calls_while_the_other_does_something_else, tmp_path / "said", num_ranks=2):
        assert said.startswith("rank 0 calls the model, and has waited 8 s for others. Ranks that have left")


class SaidAtTheEnd(Said):
    def emit(self, record):
        if "is through with it" in record.getMessage():
            super().emit(record)


class Waits(nn.Linear):
    """On the second rank, until the first one has said something."""

    def forward(self, x, path):
        if torch.distributed.get_rank() == 1:
            until(path.exists)
        return super().forward(x)


def is_through_before_the_other(path):
    long_wait.SAYS_AFTER_S, long_wait._LOOKS_EVERY_S = 0.0, 0.01
    model = rotorch.parallelize(Waits(2, 2), "ddp=2", device="cpu")
    if torch.distributed.get_rank() == 0:
        logging.getLogger("rotorch").addHandler(SaidAtTheEnd(path))
    model(torch.ones(1, 2), path)
    return path.read_text()


def test_a_rank_that_is_through_with_its_pass_says_so(tmp_path):
    load_step_code(["ddp"])
    for said in run_ranks(is_through_before_the_other, tmp_path / "said", num_ranks=2):
        assert said.startswith("rank 0 calls the model, is through with it, and has waited 8 s for others. They may")
