"""Models over two hosts of two ranks: equal to one process, with the bytes and memory that the Layout says."""

import platform

import pytest
import torch
from one_process import build, one_process
from torch import distributed as dist

import rotorch
from rotorch.comm.meter import Meter
from rotorch.core.errors import ConfigError
from rotorch.models.describe import describe
from rotorch.strategies import parse_parallel
from rotorch.testing.arithmetic import exact_arithmetic
from rotorch.testing.compare import gradient_errors
from rotorch.testing.parity import parity_batch
from rotorch.testing.ranks import run_ranks
from rotorch.testing.reference import plain_config
from rotorch.testing.traffic import traffic_problems

pytestmark = pytest.mark.usefixtures("warm")

SEED, STEPS, EXACT = 5, 2, 1e-10
HOSTS = "aabb"


def reference(config):
    return one_process(
        config, [parity_batch(step=step, vocab_size=config.vocab_size) for step in range(STEPS)], seed=SEED
    )


def compared(config, layouts, hosts, expected):
    """Largest error of each layout on this rank, and what is wrong with its traffic."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform, "node", lambda: hosts[dist.get_rank()])
        for layout in layouts:
            model = rotorch.parallelize(build(config), layout, device="cpu").materialize(seed=SEED)
            optimizer, worst = torch.optim.SGD(model.parameters(), lr=0.1), 0.0
            assert model.sharded.transport == "hierarchical"
            for step, (loss, gradients) in enumerate(expected):
                batch = parity_batch(step=step, vocab_size=config.vocab_size)
                mine = {k: rows.tensor_split(model.num_batch_ranks)[model.batch_rank] for k, rows in batch.items()}
                with exact_arithmetic(), Meter() as meter:
                    ours = float(model.forward_backward([mine]))
                worst = max(worst, abs(ours - loss) / loss, *gradient_errors(model.weights, gradients).values())
                optimizer.step()
                optimizer.zero_grad()
            problems = list(traffic_problems(model, meter))
            slots = sum(slot.numel() * slot.element_size() for slot in model.sharded.slots())
            said = max(model.strategies[-1].layout(unit).slots_bytes for unit in model.spec.units)
            found.append((worst, problems, slots - said))
            model.close()
    return found


@pytest.mark.parametrize(
    ("tied", "recomputes"),
    [
        (False, ("none", "slice")),
        pytest.param(False, ("head",), marks=pytest.mark.slow),
        pytest.param(True, ("none", "head", "slice"), marks=pytest.mark.slow),
    ],
)
def test_two_hosts_are_one_process_with_the_bytes_of_the_layout(tiny, tied, recomputes):
    config = plain_config(tiny("llama"), layers=2)
    config.tie_word_embeddings = tied
    layouts = [f"rtp=4[transport=hierarchical,recompute={each}]" for each in recomputes]
    for of_rank in run_ranks(compared, config, layouts, HOSTS, reference(config), num_ranks=4):
        for worst, problems, beyond in of_rank:
            assert worst <= EXACT and problems == [] and beyond == 0


def test_sequences_shared_within_a_host_and_over_two_are_one_process(tiny):
    config = plain_config(tiny("llama"), layers=1)
    layouts = [f"rtp=4[transport=hierarchical,context={c}]" for c in (2, 4)]
    for of_rank in run_ranks(compared, config, layouts, HOSTS, reference(config), num_ranks=4):
        for worst, _, beyond in of_rank:
            assert worst <= EXACT and beyond == 0


def test_replicas_of_two_hosts_are_one_process(tiny):
    config = plain_config(tiny("llama"), layers=1)
    layouts = ["ddp=2,rtp=4[transport=hierarchical]"]
    for of_rank in run_ranks(compared, config, layouts, "aabbccdd", reference(config), num_ranks=8):
        for worst, _, beyond in of_rank:
            assert worst <= EXACT and beyond == 0


@pytest.mark.parametrize("size", [2, 5])
def test_a_ring_that_does_not_divide_into_hosts_is_refused(size, tiny):
    config = plain_config(tiny("llama"), layers=1)
    (rtp,) = parse_parallel(f"rtp={size}[transport=hierarchical]")
    with pytest.raises(ConfigError, match=f"over 2 hosts, but a ring of {size} does not give each as many ranks"):
        rtp.check(describe(build(config)))


def test_hosts_without_the_transport_that_goes_by_them_are_refused(tiny):
    (rtp,) = parse_parallel("rtp=6[hosts=3]")
    with pytest.raises(ConfigError, match="hosts=3 is for transport=hierarchical, and transport is auto"):
        rtp.check(describe(build(plain_config(tiny("llama"), layers=1))))


def test_autocast_is_refused_by_name():
    (rtp,) = parse_parallel("rtp=4[transport=hierarchical]")
    with pytest.raises(ConfigError, match=r"passes compute with them in bfloat16\. Write transport=send_receive"):
        rtp.at_precision("bfloat16")
