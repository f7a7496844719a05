"""rtp over Hugging Face models beyond parity: defects that other implementations had, and what never exists."""

import warnings

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import rotorch
from rotorch._torch_private import TorchDispatchMode, in_backward, tree_flatten
from rotorch.comm.meter import Meter
from rotorch.comm.transports import messages
from rotorch.core.spec import UnitKind
from rotorch.core.traffic import Kind
from rotorch.models.hf import causal_lm, load_config
from rotorch.testing.ranks import run_ranks
from rotorch.testing.traffic import traffic_problems

pytestmark = pytest.mark.usefixtures("warm")

SEQUENCE = 16


def model_of(path, *, layers=1, **changes):
    torch.manual_seed(0)
    config = load_config(path)
    config.num_hidden_layers = layers
    for name, value in changes.items():
        setattr(config, name, value)
    return causal_lm(config)


def rows_of(rank, num_rows=2, vocabulary=300):
    ids = torch.randint(0, vocabulary, (num_rows, SEQUENCE), generator=torch.Generator().manual_seed(rank))
    return {"input_ids": ids, "labels": ids}


def dense_step(path, n, **changes):
    """Gradients of all ranks' rows on one process, in the same order of micro-batches."""
    model = model_of(path, **changes).double()
    outputs = []
    for rank in range(n):
        attention = model.model.layers[0].self_attn
        handle = attention.register_forward_hook(lambda _m, _a, out: outputs.append(out[0].detach()))
        model(**rows_of(rank), num_items_in_batch=n * 2 * (SEQUENCE - 1), use_cache=False).loss.backward()
        handle.remove()
    return model, outputs


def compare(path, layout, seen):
    """One step on every rank and on one process; `seen(parallel model, dense model, attention outputs, batch)`."""
    n = dist.get_world_size()
    dense, outputs = dense_step(path, n)
    model = rotorch.parallelize(model_of(path).double(), layout, device="cpu")
    got = []
    attention = model.module.model.layers[0].self_attn
    attention.register_forward_hook(lambda _m, _a, out: got.append(out[0].detach()))
    model.forward_backward(rows_of(model.batch_rank))
    torch.testing.assert_close(got[0], outputs[model.batch_rank], rtol=1e-5, atol=1e-6)
    seen(model, dense)
    model.close()


CLOSE = {"rtol": 1e-5, "atol": 1e-7}  # the model's norms and loss compute in float32
OVER_MESSAGES = "rtp=3[transport=send_receive]"


# ---------------------------------------------------------------- defects of the public reference


def nothing_more(model, dense):
    pass


def test_defect_1_attention_runs_on_the_visiting_slice(tiny):
    """Its output is the dense one, on every rank for its own rows."""
    run_ranks(compare, tiny("llama"), OVER_MESSAGES, nothing_more, num_ranks=3)


def watched(path):
    """Every exchange of a step: no memory is sent and received into at once."""
    init, overlaps, under_way = messages.Exchange.__init__, [], []

    def bytes_of(tensor):
        start = tensor.data_ptr()
        return range(start, start + tensor.numel() * tensor.element_size())

    def watch(self, *, send, to, receive, source, group):
        init(self, send=send, to=to, receive=receive, source=source, group=group)
        under_way[:] = [e for e in under_way if e[0]._sent or e[0]._received]
        under_way.append((self, bytes_of(send), bytes_of(receive)))
        for _, sends, _ in under_way:
            for _, _, receives in under_way:
                both = range(max(sends.start, receives.start), min(sends.stop, receives.stop))
                overlaps.append(len(both))

    messages.Exchange.__init__ = watch
    compare(path, OVER_MESSAGES, all_gradients)
    return len(overlaps), max(overlaps)


def all_gradients(model, dense):
    for name, parameter in dense.named_parameters():
        torch.testing.assert_close(model.full_tensor(name, grad=True), parameter.grad, **CLOSE)


def test_defect_2_no_buffer_is_sent_and_received_into_at_once(tiny):
    for exchanges, overlap in run_ranks(watched, tiny("llama"), num_ranks=3):
        assert exchanges > 10 and overlap == 0


def replicated_gradients(model, dense):
    (unit,) = [u for u in model.spec.units if u.kind is UnitKind.REPLICATED]
    assert any("norm" in w.name for w in unit.weights)
    parameters = dict(dense.named_parameters())
    for weight in unit.weights:
        torch.testing.assert_close(model.weights[weight.name].local_grad, parameters[weight.name].grad, **CLOSE)


def test_defect_3_gradients_of_replicated_weights_are_summed(tiny):
    """On every rank, without asking another one."""
    run_ranks(compare, tiny("llama"), "rtp=2", replicated_gradients, num_ranks=2)
    run_ranks(compare, tiny("qwen3"), "rtp=2", replicated_gradients, num_ranks=2)


def bias_after_a_step(model, dense):
    name = "model.layers.0.mlp.down_proj.bias"
    for parameters in (model.parameters(), dense.parameters()):
        torch.optim.SGD(parameters, lr=0.5).step()
    torch.testing.assert_close(model.weights[name].local, dense.get_parameter(name).detach(), **CLOSE)


def test_defect_4_a_row_wise_bias_takes_one_step_of_its_own_size(tiny):
    run_ranks(compare, tiny("llama"), OVER_MESSAGES, bias_after_a_step, num_ranks=3)


def groups_and_chunks(model, dense):
    ring = model.sharded._inner.ring
    assert ring.size == 2 and dist.get_world_size() == 4
    for name, parameter in dense.named_parameters():
        held = model.weights[name]
        assert isinstance(held.parameter, DTensor) and held.parameter.shape == parameter.shape
        assert model.state_dict()[name].size() == parameter.shape
        for chunk in held.chunks:
            torch.testing.assert_close(chunk.of_local(held.local), chunk.of_whole(parameter.detach()))
    all_gradients(model, dense)


def uneven_chunks(model, dense):
    held = model.weights["model.layers.0.self_attn.k_proj.weight"]
    assert held.local.shape[0] == (32, 16, 16)[model.sharded.ring.position]  # 4 key/value heads over 3 ranks
    all_gradients(model, dense)


def test_defect_5_rings_inside_a_larger_job_whole_state_and_uneven_cuts(tiny):
    run_ranks(compare, tiny("llama"), "ddp=2,rtp=2", groups_and_chunks, num_ranks=4)
    run_ranks(compare, tiny("llama"), "rtp=3", uneven_chunks, num_ranks=3)


class Copies(TorchDispatchMode):
    """Numbers of elements of all tensors that operations made anew."""

    def __init__(self, *, forward_only=False):
        super().__init__()
        self.numels = []
        self.forward_only = forward_only

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        if self.forward_only and in_backward():
            return func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        self.numels += [
            t.numel()
            for t in tree_flatten(out)[0]
            if isinstance(t, torch.Tensor) and t.device.type == "cpu" and t.untyped_storage().data_ptr() not in given
        ]
        return out


def copies(path, layout):
    """The largest tensor made in forward passes over very few tokens, and the smallest slice of a matrix."""
    model = rotorch.parallelize(model_of(path), layout, device="cpu")
    batch = {key: value[:1, :4] for key, value in rows_of(model.batch_rank).items()}
    model.forward_backward(batch)
    with Copies(forward_only=True) as mode:
        model.evaluate(batch)
        model.forward_backward(batch, accumulate=True)
    slices = [held.local.numel() for held in model.weights.values() if held.num_holders == 1 and held.local.dim() == 2]
    model.close()
    return max(mode.numels), min(slices)


@pytest.mark.parametrize("layout", ["rtp=2", "rtp=2[transport=send_receive]", "rtp=2[recompute=slice]"])
def test_defect_6_no_slice_is_copied_in_forward(layout, tiny):
    """In backward a product may have to wait beside the buffer that it will be added to."""
    for largest, smallest_slice in run_ranks(copies, tiny("llama"), layout, num_ranks=2):
        assert largest < smallest_slice


# ---------------------------------------------------------------- what never exists, and bytes


def largest_tensor(path, layout, biased=False):
    vocabulary = 2048
    module = model_of(path, vocab_size=vocabulary)
    if biased:
        module.lm_head.bias = nn.Parameter(torch.zeros(vocabulary))
    model = rotorch.parallelize(module, layout, device="cpu")
    found = []
    with Copies() as mode:
        model.forward_backward(rows_of(model.batch_rank, num_rows=16))
        found.append(max(mode.numels))
        mode.numels.clear()
        model.evaluate(rows_of(model.batch_rank, num_rows=16))
        found.append(max(mode.numels))
    model.close()
    return [numel / (16 * SEQUENCE * vocabulary) for numel in found]


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.slow), "gemma2"])
@pytest.mark.parametrize("recompute", ["head", "slice", "none"])
def test_full_logits_never_exist(family, recompute, tiny):
    """Nor half of them: a third on each of three visits, and padding and other tensors are smaller still."""
    for shares in run_ranks(largest_tensor, tiny(family), f"rtp=3[recompute={recompute}]", num_ranks=3):
        assert max(shares) < 0.4


def test_full_logits_of_a_head_with_a_bias_never_exist(tiny):
    for shares in run_ranks(largest_tensor, tiny("llama"), "rtp=3", True, num_ranks=3):
        assert max(shares) < 0.4


def sent(path, layout):
    model = rotorch.parallelize(model_of(path, layers=2), layout, device="cpu")
    problems = []
    for _ in range(2):
        with Meter() as meter:
            model.forward_backward(rows_of(model.batch_rank), accumulate=True)
        problems += list(traffic_problems(model, meter))
    model.close()
    return problems, meter.sent_bytes[Kind.SEND]


@pytest.mark.parametrize(
    "options",
    ["", pytest.param(",recompute=none", marks=pytest.mark.slow), ",recompute=none,buffering=in_place", ",ahead=2"],
)
def test_bytes_sent_are_the_layouts_to_the_byte(options, tiny):
    families = {"": ("llama", "qwen3")}  # qwen3: embedding and head are one weight
    for family in families.get(options, ("qwen3",)):
        results = run_ranks(sent, tiny(family), f"rtp=3[transport=send_receive{options}]", num_ranks=3)
        assert [problems for problems, _ in results] == [[]] * 3
        assert all(sent > 0 for _, sent in results)


# ---------------------------------------------------------------- mixed precision, checkpointing


def losses(path, layout, autocast, checkpointing=False):
    module = model_of(path, layers=2)
    if checkpointing:
        with warnings.catch_warnings():  # it has another name in some versions of transformers
            warnings.simplefilter("ignore", FutureWarning)
            module.gradient_checkpointing_enable({"use_reentrant": False})
        module.train()
    dtype = torch.bfloat16 if autocast else None
    model = rotorch.parallelize(module, layout, device="cpu", autocast_dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out = []
    for _ in range(3):
        optimizer.zero_grad()
        rows = rows_of(0, num_rows=6)
        share = slice(
            model.batch_rank * 6 // model.num_batch_ranks, (model.batch_rank + 1) * 6 // model.num_batch_ranks
        )
        out.append(float(model.forward_backward({key: value[share] for key, value in rows.items()})))
        optimizer.step()
    model.close()
    return out


@pytest.mark.parametrize(
    "layout", [pytest.param("rtp=2", marks=pytest.mark.slow), "rtp=3[recompute=slice,transport=send_receive]"]
)
def test_under_autocast_losses_are_those_of_one_process_to_bfloat16(layout, tiny):
    (expected,) = run_ranks(losses, tiny("llama"), "single", True, num_ranks=1)
    got = run_ranks(losses, tiny("llama"), layout, True, num_ranks=int(layout[4]))[0]
    assert got == pytest.approx(expected, rel=5e-3)  # 8 bits a product, averaged over the tokens of a loss
    assert expected[-1] < expected[0]


def test_checkpointed_blocks_run_their_units_again(tiny):
    (expected,) = run_ranks(losses, tiny("llama"), "single", False, num_ranks=1)
    for layout in ("rtp=2", "rtp=2[recompute=slice,transport=send_receive]"):
        got = run_ranks(losses, tiny("llama"), layout, False, True, num_ranks=2)[0]
        assert got == pytest.approx(expected, rel=1e-5)


class CountsAttention(TorchDispatchMode):
    """Counts forward passes of attention, and the bytes that operations leave behind."""

    def __init__(self):
        super().__init__()
        self.passes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.passes += "scaled_dot_product" in str(func) and "backward" not in str(func)
        return func(*args, **(kwargs or {}))


def attention_passes(path, layout):
    model = rotorch.parallelize(model_of(path, layers=2), layout, device="cpu")
    with CountsAttention() as counted:
        model.forward_backward(rows_of(model.batch_rank))
    model.close()
    return counted.passes


@pytest.mark.parametrize(("recompute", "passes"), [("none", 4), ("all_but_attention", 4), ("slice", 8)])
def test_attention_runs_again_only_where_it_is_said_so(recompute, passes, tiny):
    """Two layers, two slices each; over messages, where attention runs on slices whatever is recomputed."""
    layout = f"rtp=2[recompute={recompute},transport=send_receive]"
    assert run_ranks(attention_passes, tiny("llama"), layout, num_ranks=2) == [passes] * 2


class Scaled(nn.Module):
    """A weight of its own, which is whole, around a part that counts its calls."""

    def __init__(self):
        super().__init__()
        self.scale, self.inside, self.calls = nn.Parameter(torch.ones(8)), nn.Identity(), []
        self.inside.register_forward_hook(lambda *_: self.calls.append(1))

    def forward(self, x):
        return self.inside(x) * self.scale


def test_modules_around_others_do_not_run_again_as_norms_do():
    """They may draw random numbers, or take as long as a unit."""
    module = nn.Sequential(nn.Linear(8, 8), Scaled(), nn.LayerNorm(8), nn.Linear(8, 8))
    model = rotorch.parallelize(
        module, "rtp=1[recompute=slice]", device="cpu", loss=lambda net, batch, _: net(batch["x"]).sum()
    )
    model.forward_backward([{"x": torch.randn(4, 8), "labels": torch.zeros(4, dtype=torch.long)}])
    assert len(module[1].calls) == 1
    model.close()
