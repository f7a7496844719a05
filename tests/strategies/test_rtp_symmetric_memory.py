"""rtp over the state machine of symmetric memory is exact, and in order: on models, without GPUs.

The windows are files that CPU ranks map, lanes run at random, and whatever the model reads or writes while a copy may
be under way is found (`rotorch.testing.peer_memory`). What CUDA does is tested in tests/gpu.
"""

import pytest

from rotorch.comm.meter import Meter
from rotorch.comm.transports.symmetric_memory import SymmetricMemoryRing
from rotorch.core.errors import RankFailure
from rotorch.strategies.rtp import apply
from rotorch.testing.peer_memory import FakeLane, FakePeerMemory
from rotorch.testing.verify import BAR, verify

pytestmark = pytest.mark.usefixtures("warm")


@pytest.fixture(autouse=True)
def over_symmetric_memory(monkeypatch):
    """Every ring that ranks forked from here make; they watch what they compute until they end."""
    with Meter():
        pass

    def make_ring(transport, *, mesh, numels, dtype, device, **_):
        ring = SymmetricMemoryRing(mesh=mesh, numels=numels, dtype=dtype, device=device, make_memory=FakePeerMemory)
        watching = ring._memory.watched()
        watching.__enter__()
        ring.watching = watching
        return ring

    monkeypatch.setattr(apply, "make_ring", make_ring)


@pytest.mark.parametrize(
    ("parallel", "model"),
    [
        ("rtp=2", "llama"),
        ("rtp=3", "qwen3"),
        ("rtp=4", "llama"),
        ("rtp=2[recompute=none]", "mixtral"),
        ("rtp=3[recompute=slice]", "gemma2"),
        ("rtp=2[recompute=slice]", "gpt_neox"),
        ("ddp=2,rtp=2", "llama"),
    ],
)
def test_float64_parity(parallel, model, tiny):
    report = verify(tiny(model), parallel=parallel, layers=2, steps=2, timeout_s=240)
    assert report.ok, (report.verdict, report.first_divergence, report.worst_weights)
    assert report.max_rel_err_loss <= BAR
    assert report.max_rel_err_grad <= BAR


def test_a_copy_that_does_not_wait_for_the_model_is_found(tiny, monkeypatch):
    after = FakeLane.after
    monkeypatch.setattr(FakeLane, "after", lambda lane, mark: lane.name != "fetches" and after(lane, mark))
    with pytest.raises(RankFailure, match=r"OutOfOrder: rank \d: fetches writes what compute reads"):
        verify(tiny("llama"), parallel="rtp=3", layers=2, steps=2, timeout_s=240)
