"""Ranks that do not get on: a stopped one, a message that is lost, collectives that do not match."""

import contextlib
import math
import os
import re
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from commands import rotorch, write_run

from rotorch.comm.status_word import Operation, at
from rotorch.comm.transports import send_receive
from rotorch.core.errors import RankFailure
from rotorch.parallelize import parallelize
from rotorch.process.forking import forking
from rotorch.train import loop
from rotorch.train.checks.memory import TensorBytes
from rotorch.train.launch import watchdog
from rotorch.train.launch.elastic import launch, run_as_rank
from rotorch.train.launch.status import FailureKind, RankPhase, RankStatus, StatusBoard
from rotorch.train.launch.watchdog import RankWatchdog, StallClock, explain_hang, format_record


def status(rank, step, phase=RankPhase.FORWARD_BACKWARD, position=""):
    return RankStatus(rank, 100 + rank, step, phase, FailureKind.NONE, 0.0, 0.0, "", position)


def test_who_stood_still_first_is_named_first():
    found = explain_hang([status(0, 3), status(1, 3, position="at x")], still_s={0: 9.6, 1: 11.2}, states={})
    assert str(found) == (
        "rank 1 has not got on for 11 s: it is in step 3, computing forward and backward, at x "
        "(rank 0 is in step 3, computing forward and backward, for 10 s)"
    )


@pytest.mark.parametrize("state", ["running", "sleeping"])
def test_a_rank_that_computes_may_be_slow(state):
    found = str(explain_hang([status(0, 3), status(1, 3)], still_s={0: 9.0, 1: 11.0}, states={0: "sleeping", 1: state}))
    assert found.startswith("rank 1 has not got on for 11 s") and found.count("rank 0 is in step 3") == 1
    hint = ". It may be computing: if that may take so long, write a longer train.timeout_s"
    assert found.endswith(hint) == (state == "running")


def test_a_stopped_rank_is_named_before_all_others_and_whatever_it_is_doing():
    saving = [status(0, 3), status(1, 3, RankPhase.SAVING)]
    found = explain_hang(saving, still_s={0: 12.0, 1: 11.0}, states={1: "stopped by a signal"})
    assert str(found).startswith("rank 1 (stopped by a signal) has not got on for 11 s: it is in step 3, writing")
    assert explain_hang(saving, still_s={0: 12.0, 1: 11.0}, states={}) is None  # that may take long


def test_progress_is_any_number_that_changes(monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now_s[0])
    board = StatusBoard(1)
    board.enter(0, pid=1)
    progress, position = StallClock(board), board.position

    def after(seconds):
        now_s[0] += seconds
        return progress.look()[0]

    assert [after(0.5) for _ in range(3)] == [0.0, 0.5, 1.0]
    assert after(3600.0) == 2.0  # the machine was asleep
    position.now = at(Operation.SLICE_FORWARD, unit=1, part=1)
    assert after(0.5) == 0.0
    position.micro_batch = 2
    assert after(0.5) == 0.0
    board.doing(RankPhase.OPTIMIZER, step=1)
    assert [after(0.5) for _ in range(2)] == [0.0, 0.5]


def test_a_board_says_where_a_rank_is_in_its_units_names():
    board = StatusBoard(2)
    board.enter(1, pid=7)
    board.name_units(["a", "b" * 300_000])
    board.name_units(["a", "model.layers.1.mlp"])
    board.position.now = at(Operation.AWAIT_SLICE, unit=1, part=0)
    board.position.peer = 1
    assert board.read(1).position == ""  # not in a pass
    board.doing(RankPhase.FORWARD_BACKWARD, step=4)
    assert board.read(1).position == "waiting for slice 0 of 'model.layers.1.mlp' from rank 0"
    assert board.read(0).position == ""
    board.fail("why", kind=FailureKind.OWN)
    assert board.read(1).message == "why" and "mlp" in board.read(1).position


def test_what_compiles_may_take_long():
    board = StatusBoard(1)

    def hangs(phase):
        board.doing(phase)
        return explain_hang([board.read(0)], still_s={0: 900.0}, states={}) is not None

    assert hangs(RankPhase.FORWARD_BACKWARD)
    board.will_compile()
    for phase in (RankPhase.FORWARD_BACKWARD, RankPhase.EVALUATING):
        assert [hangs(phase) for _ in range(3)] == [False, True, True]  # once
    for phase in (RankPhase.SAMPLING, RankPhase.EXAMINING):
        assert not hangs(phase) and not hangs(phase)
    assert hangs(RankPhase.CLIPPING)


@pytest.mark.parametrize("goes_back", [False, True])
def test_waiting_for_a_save_and_going_back_may_take_long(monkeypatch, goes_back):
    board = StatusBoard(1)
    was = {}

    def noted(name, result=None):
        def call(*_, **__):
            was[name] = board.read(0).phase
            return result

        return call

    class End(Exception):
        pass

    saver = SimpleNamespace(wait=noted("wait"), check=noted("check"))

    def end(*_, **__):
        raise End

    action = "roll_back" if goes_back else "skip"
    guard = SimpleNamespace(highest_loss=math.inf, describe=noted("describe", "it"), action=noted("action", action))
    guard.go_back = noted("go_back", "there")
    monkeypatch.setattr(loop, "DivergenceGuard", lambda *_, **__: guard)
    monkeypatch.setattr(loop, "Saver", lambda *_, **__: contextlib.nullcontext(saver))
    monkeypatch.setattr(loop, "read_batches", lambda *_, step, **__: [] if step == 1 and "wait" not in was else end())
    monkeypatch.setattr(loop, "learning_rate", lambda *_, **__: 0.1)
    monkeypatch.setattr(loop, "StepRecord", end)
    wrong = SimpleNamespace(updated=False, loss=9.0, grad_norm=1.0, peak_bytes=(0,), stop=False, rewards=None)
    monkeypatch.setattr(loop, "train_step", lambda *_, **__: wrong)
    monkeypatch.setattr(loop, "PeakMeter", noted("peak"))
    monkeypatch.setattr(loop, "tensor_bytes", noted("bytes", TensorBytes(0, 0, 0)))
    monkeypatch.setattr(loop, "memory_of_ranks", lambda *_: {})
    model = SimpleNamespace(mesh=None, device=None, sharded=SimpleNamespace(uncounted_bytes=0))
    state = SimpleNamespace(model=model, optimizer=object(), step=0, tokens=0, data={})
    train = SimpleNamespace(keep=1, async_save=True, steps=3, eval_every=0, patience=0, patience_on="held-out")
    config = SimpleNamespace(
        train=train, optimizer=SimpleNamespace(clip_norm=1.0), data=SimpleNamespace(sequence_length=8)
    )
    with pytest.raises(End):
        loop.run_loop(
            state,
            config=config,
            sizes=SimpleNamespace(global_batch=1),
            windows=SimpleNamespace(tokens_per_window=8),
            held_out=(),
            saves_in=None,
            listeners=(),
            board=board,
        )
    assert was["wait"] is RankPhase.SAVING and was["action"] is RankPhase.EXAMINING
    assert was.get("go_back") is (RankPhase.LOADING if goes_back else None)


def marks_of(run):
    """Changes on a board while a model without blocks, whose forward writes nothing down, did something."""
    board = StatusBoard(1)
    board.enter(0, pid=1)
    marks = []

    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(8, 8)

        def forward(self, input_ids, **_):
            marks.append(board.mark(0))
            return SimpleNamespace(logits=self.table(input_ids))

    def loss(module, batch, num_targets):
        return module(**batch).logits.sum() / num_targets

    model = parallelize(Plain(), "single", device="cpu", loss=loss)
    assert model.write_status_to(board.position) == []
    run(model)
    return marks


def test_an_evaluation_gets_on_with_every_batch():
    batch = {"input_ids": torch.zeros(1, 4, dtype=torch.long), "labels": torch.zeros(1, 4, dtype=torch.long)}
    assert len(set(marks_of(lambda model: model.evaluate([batch] * 3)))) == 3


def test_a_sample_gets_on_with_every_token():
    ids = torch.zeros(1, 4, dtype=torch.long)
    assert len(set(marks_of(lambda model: [model.next_token_logits(ids) for _ in range(3)]))) == 3


# ---------------------------------------------------------------- real ranks


def test_a_lost_message_is_named_with_its_slice(tmp_path, warm, monkeypatch):
    real, number = send_receive.Exchange, [0]

    def losing(*, send, **others):
        number[0] += 1
        lost = number[0] == 30 and os.environ.get("RANK") == "1"
        return real(send=send[:0] if lost else send, **others)

    monkeypatch.setattr(send_receive, "Exchange", losing)
    settings = ["--parallel=rtp=2[transport=send_receive]", "train.timeout_s=3", "train.steps=1000"]
    command = rotorch(tmp_path / "log", "train", write_run(tmp_path), *settings)
    assert command.code == 3
    (told,) = command.stderr.strip().splitlines()
    assert re.search(r"rotorch: rank \d has not got on for \d+ s: it is in step \d+, computing", told)
    assert re.search(
        r"rank 0 (is|has not got on for \d+ s: it is) in step [^;]*waiting for (the gradient of )?slice", told
    )
    assert " from rank 1" in told
    report = (tmp_path / "run" / "failure.txt").read_text()
    waits = (
        r"rank 0 \(process \d+, sleeping\): .*\n  micro-batch 1, waiting for .*slice \d of 'model.*' from rank 1, for"
    )
    assert re.search(waits, report)
    assert report.count("most recent call first") >= 2 and "in forward_backward" in report
    assert "torch's flight recorder:" in report


def mismatched(board):
    other = dist.new_group([0, 1])
    board.doing(RankPhase.FORWARD_BACKWARD, step=1)
    board.name_units(["first", "second"])
    if board.own_rank == 0:
        first_collective()
    else:
        second_collective(other)


def first_collective():
    dist.all_reduce(torch.ones(5))


def second_collective(group):
    dist.broadcast(torch.ones(7), 0, group=group)


def test_collectives_that_do_not_match_are_shown_side_by_side(tmp_path):
    with pytest.raises(RankFailure, match=r"rank \d has not got on for \d+ s: it is in step 1, computing"):
        launch(mismatched, num_ranks=2, timeout_s=2, traceback_dir=tmp_path)
    *_, first, second = (tmp_path / "failure.txt").read_text().split("\nrank ")
    assert "in first_collective" in first and "in second_collective" in second
    assert re.search(r"gloo:all_reduce number \d+ of group .*\[\[5\]\]", first)
    assert re.search(r"gloo:broadcast number \d+ of group .*\[\[7\]\]", second)


def test_a_rank_of_torchrun_ends_itself_and_says_where_it_was(tmp_path):
    with forking():
        pid = os.fork()
    if pid == 0:
        os.environ.update(RANK="3", WORLD_SIZE="4")
        sys.stderr = (tmp_path / "stderr").open("w")
        run_as_rank(never_ending, traceback_dir=tmp_path, timeout_s=1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    told = (tmp_path / "stderr").read_text()
    assert told.startswith("rotorch: rank 3 has not got on for 1 s: it is in step 5, computing forward and backward")
    report = (tmp_path / "failure.txt").read_text()
    assert re.search(r"rank 3 \(process \d+, \w+\): in step 5", report) and "in never_ending" in report


def test_a_rank_of_torchrun_that_computes_may_be_slow(tmp_path):
    with forking():
        pid = os.fork()
    if pid == 0:
        os.environ.update(RANK="0", WORLD_SIZE="1")
        sys.stderr = (tmp_path / "stderr").open("w")
        run_as_rank(computing, timeout_s=1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    told = (tmp_path / "stderr").read_text()
    assert told.endswith("It may be computing: if that may take so long, write a longer train.timeout_s\n"), told


def computing(board):
    board.doing(RankPhase.FORWARD_BACKWARD, step=1)
    while True:
        pass


def never_ending(board):
    board.doing(RankPhase.FORWARD_BACKWARD, step=5)
    threading.Event().wait()


def test_no_watch_is_kept_after_the_work(tmp_path):
    board = StatusBoard(1)
    board.doing(RankPhase.FORWARD_BACKWARD, step=1)
    with RankWatchdog(board, rank=0, timeout_s=0.6, directory=None):
        pass
    time.sleep(1.2)  # it would have ended this process


def test_a_record_says_what_has_not_come_to_an_end():
    done = {"profiling_name": "gloo:send", "retired": True, "is_p2p": True, "p2p_seq_id": 4, "process_group": ["0"]}
    waiting = {**done, "profiling_name": "nccl:all_reduce", "retired": False, "is_p2p": False, "state": "started"}
    waiting |= {"collective_seq_id": 9, "input_sizes": [[2, 3]], "process_group": ["0", "default_pg"]}
    assert format_record({}) == ""
    assert format_record({"entries": [waiting, done]}).splitlines() == [
        "torch's flight recorder:",
        "  nccl:all_reduce number 9 of group 0 default_pg, [[2, 3]]: started",
    ]
    assert format_record({"entries": [done]}).splitlines()[1:] == ["  gloo:send number 4 of group 0, []: done"]
