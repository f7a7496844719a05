"""Calls of torch for symmetric memory, one by one and stream by stream, with a fake in place of CUDA."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from rotorch.comm.ring import RingSetup
from rotorch.comm.transports import peer_memory
from rotorch.comm.transports.peer_memory import CudaPeerMemory, PeerMemoryUnavailable
from rotorch.comm.transports.symmetric_memory import SymmetricMemoryRing
from rotorch.train.checks.memory import PeakMeter

DEVICE, SIZE, NUMEL = torch.device("cpu"), 2, 300


class Notes(list):
    """The calls, each with the stream that was current."""

    def __init__(self):
        super().__init__()
        self.current, self.num_changes = "compute", 0

    def note(self, *what):
        self.append((self.current, *what))


class Stream:
    def __init__(self, notes, name):
        self.notes, self.name = notes, name

    def wait_event(self, event):
        self.notes.append((self.name, "waits for", event.recorded_on))


class Event:
    made = 0

    def __init__(self):
        Event.made += 1

    def record(self, stream):
        self.recorded_on = stream.name


class Handle:
    """As torch's, for rank 0 of 2."""

    rank = 0

    def __init__(self, notes, window):
        self.notes, self.windows = notes, [window, torch.full_like(window, 5.0)]
        self.pad = torch.ones(SIZE * 32, dtype=torch.int32)

    def get_buffer(self, rank, sizes, dtype, storage_offset=0):
        (numel,) = sizes
        return self.windows[rank][storage_offset : storage_offset + numel]

    def get_signal_pad(self, rank, sizes, dtype, storage_offset=0):
        assert rank == self.rank and dtype == torch.int32
        return self.pad[storage_offset : storage_offset + sizes[0]]

    def put_signal(self, dst_rank, channel=0, timeout_ms=0):
        self.notes.note("signal", dst_rank, channel, timeout_ms)

    def wait_signal(self, src_rank, channel=0, timeout_ms=0):
        self.notes.note("wait", src_rank, channel, timeout_ms)

    def barrier(self, channel=0, timeout_ms=0):
        self.notes.note("barrier", channel, timeout_ms)


@pytest.fixture
def cuda(monkeypatch):
    notes = Notes()
    names, allocated = iter(["fetches", "hops"]), iter([100, 100, 100, 10_000])
    made = {}

    @contextmanager
    def stream(chosen):
        before, notes.current = notes.current, chosen.name
        notes.num_changes += 1
        yield
        notes.current = before

    def rendezvous(tensor, group):
        assert group == "the ring's group"
        made["handle"] = Handle(notes, tensor)
        return made["handle"]

    compute = Stream(notes, "compute")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: Stream(notes, next(names)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: next(allocated))
    monkeypatch.setattr(Event, "made", 0)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: notes.note("used on", stream.name))
    monkeypatch.setattr(peer_memory, "why_no_peer_memory", lambda mesh, device: "")
    monkeypatch.setattr(peer_memory, "any_rank", lambda flag, mesh: flag)
    monkeypatch.setattr(peer_memory, "symmetric_empty", lambda numel, dtype, device: torch.zeros(numel, dtype=dtype))
    monkeypatch.setattr(peer_memory, "symmetric_rendezvous", rendezvous)
    return SimpleNamespace(notes=notes, made=made)


MESH = SimpleNamespace(
    size=lambda: SIZE, get_local_rank=lambda: 0, get_group=lambda: "the ring's group", mesh=torch.arange(SIZE)
)


def make():
    return CudaPeerMemory(mesh=MESH, device=DEVICE, numel=NUMEL, dtype=torch.float32)


def test_what_side_streams_use_is_not_given_to_others_before_they_are_done(cuda):
    memory = make()
    assert memory.empty(4, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert cuda.notes == [("compute", "used on", "fetches"), ("compute", "used on", "hops")]


def test_only_signals_of_the_channels_asked_for_are_cleared(cuda):
    memory = make()
    memory.clear(range(3, 5))
    pad = cuda.made["handle"].pad.view(-1, SIZE)  # per channel, by sender
    assert pad[3:5].eq(0).all() and pad[:3].eq(1).all() and pad[5:].eq(1).all()


def test_each_lane_works_on_its_stream_and_waits_without_a_timeout(cuda):
    memory = make()
    for lane in (memory.compute, memory.fetches, memory.hops):
        lane.signal(1, channel=3)
        lane.wait_signal(1, channel=4)
        to, source = torch.zeros(2), torch.ones(2)
        lane.copy([to], [source])
        lane.add([to], [source])
        assert to.tolist() == [2.0, 2.0]
    memory.fetches.after(memory.hops.mark())
    memory.barrier()
    names = ("compute", "fetches", "hops")
    assert cuda.notes == [
        *((name, *what) for name in names for what in (("signal", 1, 3, 0), ("wait", 1, 4, 0))),
        ("fetches", "waits for", "hops"),
        ("compute", "barrier", 0, 0),
    ]


def test_the_host_waits_for_an_event_so_long_and_no_longer(cuda):
    memory = make()
    asked = iter([False, False, True])
    for query, comes, timeout_s in ((lambda: next(asked), True, 5.0), (lambda: False, False, 0.01)):
        mark = SimpleNamespace(event=SimpleNamespace(query=query))
        assert memory.reached(mark, timeout_s=timeout_s) == comes


def test_a_window_past_torchs_allocator_counts_beside_it(cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: Stream(cuda.notes, "any"))
    rings = [SymmetricMemoryRing(RingSetup(MESH, [[4, 3]], torch.float32, device=DEVICE)) for _ in range(2)]
    assert [ring.uncounted_bytes for ring in rings] == [rings[0].window_bytes, 0]
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5000)
    meter = PeakMeter(torch.device("cuda", 0), uncounted_bytes=rings[0].uncounted_bytes)
    assert meter.peak_bytes() == 5000 + rings[0].window_bytes > 5000


def test_a_lane_that_is_open_changes_the_stream_once(cuda):
    memory = make()
    for lane, changes in ((memory.hops, 1), (memory.compute, 0)):
        cuda.notes.num_changes = 0
        with lane.open():
            lane.signal(1, channel=3)
            lane.copy([torch.zeros(2)], [torch.ones(2)])
            lane.add([torch.zeros(2)], [torch.ones(2)])
        assert cuda.notes.num_changes == changes
    memory.hops.signal(1, channel=3)
    assert {name for name, *_ in cuda.notes} == {"hops", "compute"} and cuda.notes[-1][0] == "hops"
    assert cuda.notes.current == "compute"


def test_an_event_is_recorded_again_once_nobody_can_wait_for_it(cuda):
    memory = make()
    first = memory.hops.mark()
    kept = first.event
    second = memory.hops.mark()
    assert second.event is not kept and Event.made == 2
    del first
    third = memory.hops.mark()
    assert third.event is kept and Event.made == 2


@pytest.mark.parametrize("fails", ["symmetric_empty", "symmetric_rendezvous"])
def test_what_torch_cannot_give_is_said_in_one_line(cuda, monkeypatch, fails):
    def fail(*_, **__):
        raise RuntimeError("CUDA driver error: out of memory\nand much more")

    monkeypatch.setattr(peer_memory, fails, fail)
    with pytest.raises(PeerMemoryUnavailable, match=r"^CUDA driver error: out of memory$"):
        make()


def test_if_another_rank_has_none_this_one_has_none(cuda, monkeypatch):
    monkeypatch.setattr(peer_memory, "any_rank", lambda flag, mesh: True)
    with pytest.raises(PeerMemoryUnavailable, match="another rank of the ring has no room"):
        make()


def test_a_step_of_a_ring_of_two_call_by_call(cuda, monkeypatch):
    monkeypatch.setattr(CudaPeerMemory, "reached", lambda *_, **__: True)
    ring = SymmetricMemoryRing(RingSetup(MESH, [[4, 3]], torch.float32, device=DEVICE))
    ring.home_weights(0).fill_(1.0)
    cuda.notes.clear()
    ring.start(fresh=[True])
    assert cuda.notes[:3] == [
        ("compute", "waits for", "hops"),
        ("compute", "waits for", "fetches"),
        ("compute", "barrier", 0, 0),
    ]
    assert [visit.weights.tolist() for visit in ring.visits(0, backward=False)] == [[1.0] * 4, [5.0] * 3]
    cuda.notes.clear()
    for visit in ring.visits(0, backward=True):
        ring.gradient(0, visit, wait=False).flat.fill_(2.0)
        ring.pass_on(0, visit)
    ring.finish()
    signals = [note for note in cuda.notes if note[1] in ("signal", "wait")]
    came, free = 3, 4  # channels of every other step; 0 is the barrier's
    assert signals == [
        ("hops", "signal", 1, free, 0),  # the other may push into this one's inbox
        ("hops", "wait", 1, free, 0),
        ("hops", "signal", 1, came, 0),  # the other's slice: made, pushed into its inbox
        ("hops", "wait", 1, came, 0),  # one's own: the other's part is in the inbox
    ]
    assert cuda.notes[-1] == ("compute", "waits for", "hops")
    inbox = slice(ring.window_bytes // 4 - 4, None)
    assert cuda.made["handle"].windows[1][inbox].tolist() == [2.0] * 3 + [5.0]
