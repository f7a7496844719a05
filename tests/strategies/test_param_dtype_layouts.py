"""Layouts of passes with weights in bfloat16: bytes sent, and copies that stay, are those that a rank really has."""

import pytest
import torch

import rotorch
from rotorch.comm.meter import Meter
from rotorch.models.hf import causal_lm, load_config
from rotorch.testing.ranks import run_ranks
from rotorch.testing.traffic import expected_copies_bytes, expected_resident_bytes, micro_batch_of, traffic_problems

pytestmark = pytest.mark.usefixtures("warm")

BF16 = torch.bfloat16
LAYOUTS = {
    1: ("single", "rtp=1"),
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
        "zeropp=2x2",
        "pp=2,fsdp=2",
        "pp=2,rtp=2[transport=send_receive]",
        "ddp=2,fsdp=2",
        "summa=2x2[transport=messages]",
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
        copies = sum(copy.untyped_storage().nbytes() for copy in model.sharded.copies())
        if copies != said:
            problems.append(f"{copies} bytes of copies, the Layouts say {said}")
        found[layout] = problems
        model.close()
    return found


@pytest.mark.parametrize("num_ranks", LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_rank_sends_and_copies_what_the_layouts_say(tiny, family, num_ranks):
    layouts = [layout for layout in LAYOUTS[num_ranks] if family == "llama" or "atp" not in layout]
    for found in run_ranks(problems, tiny(family), layouts, num_ranks=num_ranks, timeout_s=400):
        assert found == {layout: [] for layout in layouts}
