"""DTensors over parts that torch's placements do not describe: right, or refused in one line."""

import io
from functools import cache

import pytest
import torch
import torch.distributed.checkpoint as dcp
from muon_runs import build, config_of, rows
from torch.distributed.tensor import DTensor, Replicate, Shard

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.parallelize import load_step_code
from rotorch.shard.in_chunks import CutInName
from rotorch.testing.fake import as_rank
from rotorch.testing.ranks import run_ranks

QUICK = [("llama", "rtp=3"), ("gpt_neox", "megatron=3")]
"""Uneven parts, and parts of what is fused."""
SLOW = [("gpt_neox", "rtp=3")]
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
ELEMENT_WISE = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam, one by one": lambda p: torch.optim.Adam(p, lr=0.1, foreach=False, weight_decay=0.1),
    "adamw in lists": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
}
if torch.__version__ < "2.15":
    ELEMENT_WISE.pop("rprop")  # of torch 2.13 it writes by masks, which DTensor refuses
RIGHT = ("whole", "gathered", "penalty", "finite", "gradients", "computed", "norm", "saved", "summed", "pickled")
NOT_LOCAL = {
    "matmul": lambda p, q: p @ p.T,
    "view": lambda p, q: p.view(-1),
    "mean": lambda p, q: p.mean(),
    "a norm of rows": lambda p, q: torch.linalg.vector_norm(p, dim=-1),
    "redistribute": lambda p, q: p.redistribute(p.device_mesh, [torch.distributed.tensor.Shard(1)]),
    "a plain tensor": lambda p, q: p + torch.ones(p.shape, dtype=p.dtype),
}


@pytest.fixture(scope="module")
def told(tiny, tmp_path_factory):
    load_step_code(["rtp", "megatron"])
    configs = {name: config_of(tiny(name)) for name in ("llama", "gpt_neox")}
    folder = tmp_path_factory.mktemp("saved")
    of = cache(lambda *cases: run_ranks(everything, configs, folder, cases, num_ranks=3))
    return lambda *case: [of_rank[case] for of_rank in of(*(QUICK if case in QUICK else SLOW))]


def everything(configs, folder, cases):
    return {(name, layout): under(configs[name], layout, folder / f"{name}-{layout}") for name, layout in cases}


def under(config, layout, folder):
    plain, model = build(config), rotorch.parallelize(build(config), layout, device="cpu")
    batch = rows(61, step=0, share=0, num_shares=1)
    plain(**batch).loss.backward()
    model.forward_backward([batch])
    theirs = dict(plain.named_parameters())
    cut = {
        n: p for n, p in model.named_parameters() if isinstance(p, CutInName) and p.grad is not None and p.dim() == 2
    }
    name = next(n for n in cut if "proj" in n or "query" in n)
    found = {"cut": sorted(cut), "name": name}
    parameter, other = cut[name], next(p for p in model.parameters() if p.grad is not None and p.dim() == 1)
    found["refused"] = {what: _refusal(lambda c=c: c(parameter, other)) for what, c in NOT_LOCAL.items()}
    found["whole"] = max(_off(p.full_tensor(), theirs[n]) for n, p in cut.items())
    found["gradients"] = max(_off(p.grad.full_tensor(), theirs[n].grad) for n, p in cut.items())
    everywhere = [torch.distributed.tensor.Replicate()]
    gathered = parameter.redistribute(parameter.device_mesh, everywhere)
    found["gathered"] = _off(gathered.to_local(), theirs[name])
    found["computed"] = _off((2 * parameter + parameter.square()).full_tensor(), 2 * theirs[name] + theirs[name] ** 2)
    for penalty in (lambda p: (p.full_tensor() ** 2).sum(), lambda p: (p**2).sum().full_tensor()):
        (ours,) = torch.autograd.grad(penalty(parameter), parameter)
        found["penalty"] = max(found.get("penalty", 0.0), _off(ours.full_tensor(), 2 * theirs[name]))
    factor, partial = 1 + torch.distributed.get_rank(), torch.distributed.tensor.Partial
    for placement, summed in ((partial(), 1 + 2 + 3), (partial("avg"), 2), (everywhere[0], factor)):
        of_ranks = factor * parameter.full_tensor(grad_placements=[placement]).sum()
        (ours,) = torch.autograd.grad(of_ranks, parameter)
        found["summed"] = max(found.get("summed", 0.0), float((ours.to_local() - summed).abs().max()))
    cut_gradient = [torch.distributed.tensor.Shard(0)]
    found["of a cut gradient"] = _refusal(lambda: parameter.full_tensor(grad_placements=cut_gradient))
    found["finite"] = _differ_somewhere(parameter)
    for each, p in cut.items():
        theirs[each].grad = p.grad.full_tensor()
    norm = torch.nn.utils.clip_grad_norm_([parameter], 1e9)
    found["norm"] = abs(float(norm.full_tensor()) / float(theirs[name].grad.norm()) - 1)
    with torch.no_grad():
        for what, make in ELEMENT_WISE.items():
            ours, one = make(list(cut.values())), make([theirs[n] for n in cut])
            for optimizer in (ours, one):
                optimizer.step()
                optimizer.step()
            found[what] = max(_off(p.full_tensor(), theirs[n]) for n, p in cut.items())
    moments = {n: torch.optim.AdamW([p], foreach=False) for n, p in cut.items()}
    for optimizer in moments.values():
        optimizer.step()
    state = {n: o.state[cut[n]]["exp_avg"] for n, o in moments.items()}
    torch.save(moments[name].state_dict(), memory := io.BytesIO())
    memory.seek(0)
    again = torch.load(memory)["state"][0]["exp_avg"]
    found["pickled"] = _off(again.full_tensor(), 0.1 * theirs[name].grad)
    dcp.save(state, checkpoint_id=folder)
    whole = {n: torch.zeros(p.shape, dtype=p.dtype) for n, p in cut.items()}
    dcp.load(whole, checkpoint_id=folder)
    found["saved"] = max(_off(whole[n], 0.1 * theirs[n].grad) for n in cut)
    model.close()
    return found


def _differ_somewhere(parameter):
    """0 if all ranks hear of a value that is not finite in the last rank's part, and of none where there is none."""
    gradient, last = parameter.grad.detach().clone(), torch.distributed.get_rank() == 2
    before = bool(torch.isfinite(gradient).all()), bool(torch.isnan(gradient).any())
    if last:
        gradient.to_local().view(-1)[0] = torch.nan
    after = bool(torch.isfinite(gradient).all()), bool(torch.isnan(gradient).any())
    return 0.0 if (before, after) == ((True, False), (False, True)) else 1.0


@torch.no_grad()
def _off(ours, theirs):
    return float((ours - theirs).abs().max() / theirs.abs().max())


def _refusal(call):
    try:
        call()
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_gradient_of_the_whole_that_is_cut_is_refused(told, name, layout):
    for of_rank in told(name, layout):
        said = of_rank["of a cut gradient"]
        assert said.startswith("full_tensor(grad_placements=[Shard(dim=0)])") and said.endswith("axis of the mesh")


@pytest.mark.parametrize(("name", "layout"), CASES)
@pytest.mark.parametrize("what", NOT_LOCAL)
def test_what_needs_more_than_its_elements_is_refused_in_one_line(told, name, layout, what):
    for of_rank in told(name, layout):
        said = of_rank["refused"][what]
        assert said is not None and "\n" not in said
        assert "parts are uneven or fused" in said and "rotorch.optim.Muon" in said


@pytest.mark.parametrize(("name", "layout"), CASES)
@pytest.mark.parametrize(
    "what", ["whole", "gathered", "penalty", "finite", "gradients", "computed", "norm", "saved", *ELEMENT_WISE]
)
def test_what_passes_is_right(told, name, layout, what):
    for of_rank in told(name, layout):
        assert of_rank["cut"]
        bar = 1e-5 if what == "gradients" else 1e-12  # norms of the model in float32
        assert of_rank[what] < bar


def test_a_tensor_that_is_whole_along_one_axis_alone_is_refused(tiny):
    """A rank has a part of it, in which the chunks of the weight are other elements."""
    with as_rank(0, num_ranks=3):
        model = rotorch.parallelize(build(config_of(tiny("llama"))), "atp=3x1", device="cpu")
        cut = next(p for p in model.parameters() if isinstance(p, CutInName) and p.dim() == 2)
        own, mesh = cut.to_local().detach(), cut.device_mesh
        other = DTensor.from_local(own, mesh, (Shard(0), Replicate()), shape=cut.shape, stride=cut.stride())
        with pytest.raises(ConfigError, match="its parts are uneven or fused"):
            _ = cut + other
