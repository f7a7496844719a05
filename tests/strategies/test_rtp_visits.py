"""Several slices in one visit: equal to one process, with the bytes and memory that the Layout says."""

import pytest
import torch
from one_process import build
from test_rtp_hierarchical import EXACT, SEED, reference

import rotorch
from rotorch.comm.meter import Meter
from rotorch.comm.transports.grouped import GroupedRing
from rotorch.core.errors import ConfigError
from rotorch.core.layout import combine_layouts
from rotorch.core.strategy import OneAxis
from rotorch.models.describe import describe
from rotorch.strategies import parse_parallel
from rotorch.testing.arithmetic import exact_arithmetic
from rotorch.testing.compare import gradient_errors
from rotorch.testing.parity import parity_batch
from rotorch.testing.ranks import run_ranks
from rotorch.testing.reference import plain_config
from rotorch.testing.traffic import traffic_problems

pytestmark = pytest.mark.usefixtures("warm")


class Abandoned(Exception):
    """A step ends here."""


def step_of(model, step, vocab_size, num_ranks):
    batch = parity_batch(step=step, vocab_size=vocab_size)
    rows = {k: rows.tensor_split(num_ranks)[model.batch_rank] for k, rows in batch.items()}
    with exact_arithmetic(), Meter() as meter:
        return float(model.forward_backward([rows])), meter


def leave_in_the_middle(model, step, vocab_size, num_ranks):
    """Breaks a step off on all ranks, in backward."""

    def leave(*_):
        raise Abandoned

    inner = next(m for name, m in model.module.named_modules() if name.endswith("layers.1"))
    hook = inner.register_full_backward_hook(leave)
    with pytest.raises(Abandoned):
        step_of(model, step, vocab_size, num_ranks)
    hook.remove()


def compared(config, layouts, num_ranks, expected, break_off):
    """Per layout: largest error of this rank, problems of its traffic, and bytes of slots beyond the Layout's."""
    found = []
    for layout in layouts:
        model = rotorch.parallelize(build(config), layout, device="cpu").materialize(seed=SEED)
        optimizer, worst = torch.optim.SGD(model.parameters(), lr=0.1), 0.0
        assert isinstance(model.sharded.ring, GroupedRing)
        for step, (loss, gradients) in enumerate(expected):
            if break_off:
                leave_in_the_middle(model, step, config.vocab_size, num_ranks)
                optimizer.zero_grad()
            ours, meter = step_of(model, step, config.vocab_size, num_ranks)
            worst = max(worst, abs(ours - loss) / loss, *gradient_errors(model.weights, gradients).values())
            optimizer.step()
            optimizer.zero_grad()
        problems = [] if break_off else list(traffic_problems(model, meter))
        slots = sum(slot.numel() * slot.element_size() for slot in model.sharded.slots())
        said = combine_layouts(model.strategies[-1].layout(unit) for unit in model.spec.units).slots_bytes
        found.append((worst, problems, slots - said))
        model.close()
    return found


def layouts(num_ranks, visits, *options):
    return [f"rtp={num_ranks}[transport=send_receive,visits={visits}{o}]" for o in options]


EVERY = ("", ",recompute=none", ",recompute=slice", ",ahead=2")


@pytest.mark.parametrize(
    ("name", "num_ranks", "visits", "options"),
    [
        pytest.param("llama", 4, 2, EVERY, marks=pytest.mark.slow),
        pytest.param("llama", 4, 1, EVERY, marks=pytest.mark.slow),
        ("llama", 2, 1, ("", ",recompute=slice")),
        ("llama", 4, 4, ("",)),  # the MLP's slices one by one, two of the others at once
        ("llama", 3, 1, (",recompute=none",)),  # four groups on three ranks
        pytest.param("llama", 3, 1, ("",), marks=pytest.mark.slow),
        ("qwen3", 4, 2, (",ahead=2",)),  # tied weights, norms inside of attention
        pytest.param("qwen3", 4, 2, ("", ",recompute=slice"), marks=pytest.mark.slow),
        pytest.param("gemma2", 4, 2, ("",), marks=pytest.mark.slow),
        ("gpt_neox", 4, 2, ("",)),  # blocks fused in one matrix, biases
        pytest.param("gpt_neox", 4, 2, (",recompute=none",), marks=pytest.mark.slow),
        pytest.param("gpt_neox", 4, 1, ("",), marks=pytest.mark.slow),
    ],
)
def test_slices_that_visit_together_are_one_process_with_the_bytes_of_the_layout(
    tiny, name, num_ranks, visits, options
):
    config = plain_config(tiny(name), layers=2)
    given = layouts(num_ranks, visits, *options)
    for of_rank in run_ranks(compared, config, given, num_ranks, reference(config), False, num_ranks=num_ranks):
        for layout, (worst, problems, beyond) in zip(given, of_rank, strict=True):
            assert worst < EXACT, layout
            assert (problems, beyond) == ([], 0), layout


@pytest.mark.parametrize(
    ("visits", "options"),
    [
        (1, (",recompute=slice",)),
        pytest.param(1, ("",), marks=pytest.mark.slow),
        pytest.param(2, ("", ",recompute=slice"), marks=pytest.mark.slow),
    ],
)
def test_a_step_that_breaks_off_on_all_ranks_leaves_nothing_behind(tiny, visits, options):
    config = plain_config(tiny("llama"), layers=2)
    given = layouts(4, visits, *options)
    for of_rank in run_ranks(compared, config, given, 4, reference(config), True, num_ranks=4):
        assert all(worst < EXACT for worst, _, _ in of_rank)


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("rtp=4[transport=send_receive,visits=3]", "does not divide the ring of 4"),
        ("rtp=4[visits=2]", "transport=auto brings them one by one"),
        ("rtp=4[visits=4]", "transport=auto brings them one by one"),
        ("rtp=4[transport=shared_memory,visits=2]", "transport=shared_memory brings them one by one"),
        ("rtp=4[transport=send_receive,buffering=in_place,visits=2]", "buffering=in_place brings them one by one"),
        ("rtp=4[transport=send_receive,wire=fp8,visits=2]", "wire=fp8 brings them one by one"),
    ],
)
def test_visits_that_cannot_be_are_refused_by_name(tiny, layout, said):
    (strategy,) = parse_parallel(layout)
    with pytest.raises(ConfigError, match=said):
        strategy.on_device("cpu").check(describe(build(plain_config(tiny("llama"), layers=2))))


def test_a_strategy_that_refuses_devices_in_the_older_form_still_does():
    class Older(OneAxis):
        kind = "older"

        def layout(self, unit, *, position=0):
            raise AssertionError("nothing is held")

        def check_device(self, device_type):
            if device_type == "cuda":
                raise ConfigError("not there")

    assert Older(size=2).on_device("cpu") == Older(size=2)
    with pytest.raises(ConfigError, match="not there"):
        Older(size=2).on_device("cuda")


@pytest.mark.parametrize(
    ("layout", "visits"),
    [
        ("rtp=4", 4),
        ("rtp=4[transport=symmetric_memory,recompute=none]", 4),
        ("rtp=4[transport=send_receive,ahead=2]", 4),
        ("rtp=4[visits=1]", 1),
        ("rtp=4[transport=send_receive,wire=fp8]", None),
        ("rtp=4[buffering=in_place]", None),
        ("rtp=4[recompute=slice]", None),
    ],
)
def test_between_gpus_small_units_visit_together_unless_that_takes_memory(layout, visits):
    (strategy,) = parse_parallel(layout)
    assert strategy.on_device("cuda").visits == visits
    if "symmetric_memory" not in layout and visits != 1:
        assert strategy.on_device("cpu") == strategy
