"""A pass that breaks off: on all ranks nothing is lost; on one alone nobody hangs, nor trains on with half of it.

`weights_are_home_after_an_exception` in rotorch.testing.conformance raises inside forward and backward on all ranks,
for every layout. Here: in the optimizer, on one rank alone, at different places, and what in-place rings do then.
"""

import time

import pytest
import torch
from torch import distributed as dist

import rotorch
from rotorch._torch_private import group_timeout
from rotorch.comm import transports
from rotorch.core.errors import HeardFailure, RankFailure
from rotorch.models.hf import causal_lm, load_config
from rotorch.run_config import OptimizerSection
from rotorch.testing.ranks import run_ranks
from rotorch.train.optim import make_optimizer

pytestmark = pytest.mark.usefixtures("warm")

MESSAGES = "rtp=3[transport=send_receive]"
IN_PLACE = "rtp=3[transport=send_receive,buffering=in_place]"
SHARED = "rtp=3[transport=shared_memory]"
LAYOUTS = (IN_PLACE, MESSAGES, SHARED)


class PlantedFault(Exception):
    """Raised in the middle of a step, on purpose."""


def parallel_model(path, layout, *, timeout_s=None):
    if timeout_s is not None:
        transports.group_timeout_s = lambda mesh, device: timeout_s
    torch.manual_seed(0)
    config = load_config(path)
    config.num_hidden_layers = 2
    return rotorch.parallelize(causal_lm(config), layout, device="cpu")


def rows():
    ids = torch.randint(0, 300, (2, 16), generator=torch.Generator().manual_seed(dist.get_rank()))
    return {"input_ids": ids, "labels": ids}


def plant(module, *, in_backward):
    """Makes a module raise when its output is there, or in the backward of it. Returns what to remove."""

    def fail(*_):
        raise PlantedFault

    def hook(_module, _args, output):
        first = output[0] if isinstance(output, tuple) else output
        if not in_backward:
            raise PlantedFault
        first.register_hook(fail)

    hook.sees_slices = True
    return module.register_forward_hook(hook)


def values(model):
    return {name: held.local.clone() for name, held in model.weights.items()}


def trained_once(model, optimizer):
    loss = float(model.forward_backward(rows()))
    optimizer.step()
    optimizer.zero_grad()
    return loss


def in_the_optimizer(path, layout, updated):
    """All ranks raise, before the update or after it: every weight is home, and training goes on as if undisturbed."""
    model, twin = parallel_model(path, layout), parallel_model(path, layout)
    optimizer, undisturbed = (make_optimizer(m, settings=OptimizerSection(lr=0.01)) for m in (model, twin))
    trained_once(model, optimizer)
    trained_once(twin, undisturbed)
    before = values(model)
    loss = float(model.forward_backward(rows()))

    def fail(*_):
        raise PlantedFault

    handle = (optimizer.register_step_post_hook if updated else optimizer.register_step_pre_hook)(fail)
    with pytest.raises(PlantedFault):
        optimizer.step()
    handle.remove()
    changed = [name for name, held in model.weights.items() if not torch.equal(held.local, before[name])]
    assert changed == (list(before) if updated else [])
    if not updated:
        optimizer.step()  # gradients are still there
    optimizer.zero_grad()
    assert loss == pytest.approx(trained_once(twin, undisturbed), rel=1e-6)
    assert trained_once(model, optimizer) == pytest.approx(trained_once(twin, undisturbed), rel=1e-6)
    for name, held in model.weights.items():
        torch.testing.assert_close(held.local, twin.weights[name].local, rtol=1e-4, atol=1e-6)
    model.close()
    twin.close()


@pytest.mark.parametrize("updated", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("layout", [IN_PLACE, pytest.param(MESSAGES, marks=pytest.mark.slow), SHARED])
def test_an_exception_in_the_optimizer_finds_weights_at_home(tiny, layout, updated):
    run_ranks(in_the_optimizer, tiny("llama"), layout, updated, num_ranks=3)


def one_rank(path, layout, in_backward):
    """Rank 1 raises alone. Returns what each rank met, what its notes say, whether its weights are as they were."""
    model = parallel_model(path, layout, timeout_s=4.0)
    model.forward_backward(rows())
    model.module.zero_grad()
    before, met, notes = values(model), None, []
    inner = model.module.model.layers[1].mlp.down_proj
    handle = plant(inner, in_backward=in_backward) if dist.get_rank() == 1 else None
    try:
        model.forward_backward(rows())
    except Exception as error:
        met, notes = type(error).__name__, getattr(error, "__notes__", [])
    if handle is not None:
        handle.remove()
    home = all(torch.equal(held.local, before[name]) for name, held in model.weights.items())
    refused = ""
    if "in_place" in layout:
        try:
            model.sharded.start()
        except RankFailure as error:
            refused = str(error)
    elif "shared_memory" in layout:
        goes_on_as_if_undisturbed(model, parallel_model(path, layout))
    return met, notes, home, refused


def goes_on_as_if_undisturbed(model, twin):
    model.module.zero_grad()
    assert float(model.forward_backward(rows())) == float(twin.forward_backward(rows()))
    for name, held in model.weights.items():
        torch.testing.assert_close(held.local_grad, twin.weights[name].local_grad, rtol=1e-5, atol=1e-8)


PASSES = {False: "forward", True: "backward"}
QUICK = {(IN_PLACE, True), (SHARED, True), ("ddp=2,rtp=2", False)}
"""Over messages, in shared memory, and in forward; a ring waits out its limit over messages."""


def in_each_pass(layouts):
    """Layouts and passes as a test's parameters."""
    return [
        pytest.param(
            layout,
            back,
            id=f"{layout}-{PASSES[back]}",
            marks=[] if (layout, back) in QUICK else pytest.mark.slow,
        )
        for layout in layouts
        for back in PASSES
    ]


@pytest.mark.parametrize(("layout", "in_backward"), in_each_pass(LAYOUTS))
def test_if_one_rank_raises_alone_the_others_get_a_rank_failure(tiny, layout, in_backward):
    found = run_ranks(one_rank, tiny("llama"), layout, in_backward, num_ranks=3, timeout_s=60)
    others = "HeardFailure" if "shared_memory" in layout else "RankFailure"  # there the one that leaves says so
    assert [met for met, *_ in found] == [others, "PlantedFault", others]
    for _, notes, home, refused in found:
        if layout == IN_PLACE:  # slices were on their way: said at once, and the ring does not go on with them
            assert any("Restart from a checkpoint" in note for note in notes)
            assert "buffering=in_place" in refused and "Restart from a checkpoint" in refused
        else:
            assert home and notes == []


def in_vain(path):
    """Memory that rank 1's exceptions leave on the others: one buffer as large as a slice, however often."""
    model = parallel_model(path, SHARED)
    ring, left = model.sharded.ring, []
    for _ in range(3):
        handle = plant(model.module.model.layers[1].mlp, in_backward=False) if dist.get_rank() == 1 else None
        with pytest.raises((PlantedFault, HeardFailure)):
            model.forward_backward(rows())
        if handle is not None:
            handle.remove()
        assert ring._deferred == []
        left.append(ring._discarded.data_ptr())
    if dist.get_rank() != 1:
        assert left[0] == left[1] == left[2] and ring._discarded.numel() == max(max(numel) for numel in ring.numels)
        # At most those of a slice's weights, of its gradient, and of this memory.
        assert all(len(unit._views) <= 3 * ring.size for unit in model.sharded.units)
    model.close()


def test_steps_broken_off_by_another_rank_leave_no_memory_behind(tiny):
    run_ranks(in_vain, tiny("llama"), num_ranks=3, timeout_s=60)


def gradients_from_before(path, layout, in_backward):
    """A step that was adding to gradients of another one takes them with it, and says so; the next one is right."""
    model, twin = parallel_model(path, layout), parallel_model(path, layout)
    model.forward_backward(rows())
    model.evaluate(rows())
    assert all(held.local_grad is not None for held in model.weights.values())
    handle = plant(model.module.model.layers[1].mlp.down_proj, in_backward=in_backward)
    with pytest.raises((PlantedFault, HeardFailure)) as raised:
        model.forward_backward(rows(), accumulate=True)
    handle.remove()
    assert any("are gone too: it was adding to them" in note for note in raised.value.__notes__)
    assert all(held.local_grad is None for held in model.weights.values())
    for each in (model, twin):
        each.forward_backward(rows())
    for name, held in model.weights.items():
        torch.testing.assert_close(held.local_grad, twin.weights[name].local_grad, rtol=1e-5, atol=1e-8)
    model.close()
    twin.close()


@pytest.mark.parametrize(
    ("layout", "in_backward"), in_each_pass([*LAYOUTS, "ddp=2,rtp=2", "rtp=3[recompute=none]", "pp=2,rtp=2"])
)
def test_gradients_that_a_broken_step_was_adding_to_are_gone_and_it_says_so(tiny, layout, in_backward):
    size = 4 if ",rtp" in layout else 3
    run_ranks(gradients_from_before, tiny("llama"), layout, in_backward, num_ranks=size, timeout_s=90)


def frozen_in_part(path, layout):
    """An evaluation that breaks off adds to no gradients, and so none go, whatever is frozen."""
    config = load_config(path)
    config.num_hidden_layers = 2
    module = causal_lm(config)
    module.get_input_embeddings().weight.requires_grad_(False)
    model = rotorch.parallelize(module, layout, device="cpu")
    model.forward_backward(rows())
    before = {name: held.local_grad.clone() for name, held in model.weights.items() if held.local_grad is not None}
    assert len(before) == len(model.weights) - 1
    handle = plant(model.module.model.layers[1].mlp.down_proj, in_backward=False)
    with pytest.raises((PlantedFault, HeardFailure)) as raised:
        model.evaluate(rows())
    handle.remove()
    assert not getattr(raised.value, "__notes__", [])
    assert all(torch.equal(model.weights[name].local_grad, gradient) for name, gradient in before.items())
    model.close()


@pytest.mark.parametrize(
    "layout",
    ["rtp=2", "pp=2,rtp=2", *(pytest.param(layout, marks=pytest.mark.slow) for layout in ("ddp=2,rtp=2", "pp=2"))],
)
def test_an_evaluation_that_breaks_off_leaves_gradients_alone(tiny, layout):
    run_ranks(frozen_in_part, tiny("llama"), layout, num_ranks=4 if "," in layout else 2, timeout_s=90)


def late_to_raise(path, layout):
    """All ranks raise at one place in backward; the others have left long before rank 1 comes there."""
    model = parallel_model(path, layout)
    loss = float(model.forward_backward(rows()))
    model.module.zero_grad()
    blocks = model.module.model.layers
    slow = blocks[0].register_forward_hook(lambda *_: time.sleep(0.5 if dist.get_rank() == 1 else 0.0))
    planted = plant(blocks[0].mlp.down_proj, in_backward=True)
    with pytest.raises(PlantedFault):
        model.forward_backward(rows())
    slow.remove()
    planted.remove()
    model.module.zero_grad()
    assert float(model.forward_backward(rows())) == pytest.approx(loss, rel=1e-6)
    model.close()


@pytest.mark.parametrize("layout", [MESSAGES, SHARED, pytest.param("rtp=3[recompute=none]", marks=pytest.mark.slow)])
def test_a_rank_that_is_late_to_an_exception_of_all_comes_there(tiny, layout):
    run_ranks(late_to_raise, tiny("llama"), layout, num_ranks=3, timeout_s=60)


def different_places(path):
    """Rank 1 raises one unit later than the others."""
    model = parallel_model(path, IN_PLACE, timeout_s=8.0)
    model.forward_backward(rows())
    blocks = model.module.model.layers
    plant(blocks[1].self_attn if dist.get_rank() == 1 else blocks[1].input_layernorm, in_backward=False)
    try:
        model.forward_backward(rows(), accumulate=True)
    except Exception as error:
        return type(error).__name__, getattr(error, "__notes__", [])


@pytest.mark.slow  # on a ring alone: tests/comm/test_ring.py, weights that left home do not return
def test_ranks_that_leave_at_different_places_do_not_mix_slices(tiny):
    found = run_ranks(different_places, tiny("llama"), num_ranks=3, timeout_s=60)
    assert [met for met, _ in found] == ["PlantedFault", "RankFailure", "PlantedFault"]
    assert all(any("Restart from a checkpoint" in note for note in notes) for _, notes in found)


def evaluations(path):
    """Slices return after passes that no backward follows, also from one that breaks off."""
    model = parallel_model(path, IN_PLACE)
    before = values(model)

    def are_home():
        return all(torch.equal(held.local, before[name]) for name, held in model.weights.items())

    loss = model.evaluate([rows(), rows()]).loss
    assert are_home()
    logits = model.next_token_logits(torch.arange(5).unsqueeze(0))
    assert are_home()
    handle = plant(model.module.model.layers[1].mlp.down_proj, in_backward=False)
    for broken in (lambda: model.evaluate(rows()), lambda: model.next_token_logits(torch.arange(5).unsqueeze(0))):
        with pytest.raises(PlantedFault):
            broken()
        assert are_home()
    handle.remove()
    assert model.evaluate([rows(), rows()]).loss == loss
    assert torch.equal(model.next_token_logits(torch.arange(5).unsqueeze(0)), logits)
    model.close()


def test_evaluation_brings_slices_home(tiny):
    run_ranks(evaluations, tiny("llama"), num_ranks=3)


def waits(path, layout):
    model = parallel_model(path, layout)
    ring = model.sharded.ring
    groups = [g for g in (getattr(ring, "_weight_group", None), getattr(ring, "_gradient_group", None)) if g]
    limits = [group_timeout(g, device=torch.device("cpu")) for g in groups]
    model.close()
    patience = getattr(ring, "_patience", None)
    return getattr(patience, "timeout_s", None), [limit.total_seconds() for limit in limits]


def test_a_ring_waits_as_long_as_the_job_does(tiny):
    assert run_ranks(waits, tiny("llama"), MESSAGES, num_ranks=3, timeout_s=77) == [(None, [77.0, 77.0])] * 3
    assert run_ranks(waits, tiny("llama"), IN_PLACE, num_ranks=3, timeout_s=77) == [(None, [77.0, 77.0])] * 3
    assert run_ranks(waits, tiny("llama"), SHARED, num_ranks=3, timeout_s=77) == [(77.0, [])] * 3
