"""Layouts of passes with weights in bfloat16: bytes sent, and copies that stay, are those that a rank really has."""

import pytest
import torch

import rotorch
from rotorch.comm.meter import Meter
from rotorch.core.spec import Combine, ModelSpec, Unit, UnitKind, Weight
from rotorch.models.hf import causal_lm, load_config
from rotorch.planner.prediction import unit_layout
from rotorch.strategies import Single
from rotorch.testing.ranks import run_ranks
from rotorch.testing.traffic import expected_copies_bytes, expected_resident_bytes, micro_batch_of, traffic_problems
from rotorch.train.checks.memory import tensor_bytes

pytestmark = pytest.mark.usefixtures("warm")

BF16 = torch.bfloat16
LAYOUTS = {
    1: ("single", "rtp=1", "rtp=1[transport=send_receive]", "rtp=1[transport=send_receive,buffering=in_place]"),
    2: (
        "ddp=2",
        "fsdp=2",
        "rtp=2",
        "rtp=2[transport=send_receive]",
        "rtp=2[transport=send_receive,buffering=in_place]",
        "megatron=2[transport=messages]",
        "megatron=2[transport=messages,sequence_parallel=true]",
        "atp=1x2",
        "pp=2",
        "tesseract=1x1x2[transport=messages]",
        "tesseract=1x1x2[zero=true,transport=messages]",
        "osdp=2[memory=3500KiB,inner=fsdp]",
    ),
    4: (
        "fsdp=2,megatron=2[transport=messages]",
        "rtp=2,megatron=2",
        "rtp=2[transport=send_receive],megatron=2[transport=messages]",
        "zeropp=2x2",
        "pp=2,fsdp=2",
        "pp=2,rtp=2[transport=send_receive]",
        "ddp=2,fsdp=2",
        "summa=2x2[transport=messages]",
    ),
    8: (
        "pp=2,fsdp=2,megatron=2[transport=messages,sequence_parallel=true]",
        "pp=2,rtp=2[transport=send_receive],megatron=2[transport=messages]",
    ),
}


def problems(path, layouts):
    """By layout: what this rank sends and holds otherwise than the Layouts say."""
    found = {}
    for layout in layouts:
        torch.manual_seed(0)
        model = rotorch.parallelize(causal_lm(load_config(path)), layout, device="cpu", param_dtype=BF16)
        shares = model.num_batch_ranks
        ids = torch.randint(0, 300, (2 * shares, 48), generator=torch.Generator().manual_seed(1))
        mine = ids[2 * model.batch_rank : 2 * model.batch_rank + 2]
        batch = {"input_ids": mine, "labels": mine}
        for _ in range(2):  # what a library exchanges once is no part of a step
            model.forward_backward([batch], accumulate=True)
        with Meter() as meter:
            model.forward_backward([batch], accumulate=True)
        problems = list(traffic_problems(model, meter, batch=micro_batch_of(model, batch)))
        for unit in model.spec.units:
            held = sum(model.weights[w.name].local.nbytes for w in unit.weights if w.name in model.weights)
            if held != expected_resident_bytes(model, unit):
                problems.append(f"{unit.name}: {held} bytes at rest")
        said = expected_copies_bytes(model)
        copies = sum(copy.nbytes for copy in model.sharded.copies())
        if copies != said:
            problems.append(f"{copies} bytes of copies, the Layouts say {said}")
        ledger = tensor_bytes(model, torch.optim.SGD(model.parameters(), lr=1.0))
        resident = sum(held.local.nbytes for held in model.weights.values())
        if ledger.weights != resident + said:
            problems.append(f"{ledger.weights} bytes at rest, and {resident} of shards")
        if (inner := model.strategies[-1]).kind == "rtp" and len(model.strategies) == 1:
            inner = inner.model_copy(update={"transport": model.sharded.transport})
            slots = sum(slot.nbytes for slot in model.sharded.slots())
            if slots != (layout_bytes := inner.layout_of(model.spec).slots_bytes):
                problems.append(f"{slots} bytes of slots, the Layout says {layout_bytes}")
        found[layout] = problems
        model.close()
    return found


TIED = ("pp=2", "rtp=2[transport=send_receive]")
"""Layouts in which a weight that a model uses twice is another case: a stage borrows it, it visits twice."""


@pytest.mark.parametrize(
    ("family", "num_ranks", "layouts"),
    [
        ("llama", 1, LAYOUTS[1]),
        ("llama", 2, LAYOUTS[2]),
        ("llama", 4, LAYOUTS[4]),
        pytest.param("llama", 8, LAYOUTS[8], marks=pytest.mark.slow),  # those of four ranks, one in another
        ("qwen3", 1, LAYOUTS[1]),
        ("qwen3", 2, TIED),
        pytest.param("qwen3", 2, [each for each in LAYOUTS[2] if "atp" not in each], marks=pytest.mark.slow),
        pytest.param("qwen3", 4, LAYOUTS[4], marks=pytest.mark.slow),
        pytest.param("qwen3", 8, LAYOUTS[8], marks=pytest.mark.slow),
    ],
)
def test_a_rank_sends_and_copies_what_the_layouts_say(tiny, family, num_ranks, layouts):
    for found in run_ranks(problems, tiny(family), layouts, num_ranks=num_ranks, timeout_s=400):
        assert found == {layout: [] for layout in layouts}


def within_a_budget(path):
    """Bytes that a rank holds after a step, and the budget within which units are whole."""
    budget = 5 << 20
    model = rotorch.parallelize(causal_lm(load_config(path)), f"rtp=2[memory={budget}]", device="cpu", param_dtype=BF16)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, 300, (2, 48), generator=torch.Generator().manual_seed(model.batch_rank))
    model.forward_backward([{"input_ids": ids, "labels": ids}])
    optimizer.step()
    held = tensor_bytes(model, optimizer).total
    model.close()
    return held, budget


def test_copies_count_in_a_budget(tiny):
    for held, budget in run_ranks(within_a_budget, tiny("llama"), num_ranks=2):
        assert 0.8 * budget < held <= budget


def test_tokens_that_travel_to_experts_send_what_the_layouts_say(tiny):
    """Their routing weights stay in float32."""
    for found in run_ranks(problems, tiny("mixtral"), ("fsdp=2[experts=whole]",), num_ranks=2):
        assert found == {"fsdp=2[experts=whole]": []}


def test_weights_that_are_bfloat16_already_have_no_copies():
    weights = (Weight("a", (4, 4), 4), Weight("b", (4, 4), 2))
    spec = ModelSpec("model", (Unit("u", UnitKind.REPLICATED, Combine.NONE, weights),)).with_copies(2)
    assert [weight.copy_itemsize for weight in spec.weights] == [2, None]
    assert unit_layout(spec.units[0], strategies=(Single(),), positions=(0,)).copies_bytes == 32
