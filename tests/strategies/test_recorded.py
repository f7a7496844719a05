"""`compile="reduce-overhead"`: passes that torch records as CUDA graphs, held to what a recording needs, without CUDA.

A stand-in for torch's CUDA graph trees is the compiler's backend: a graph gives its results in the same memory in every
iteration, all of which is overwritten when the next one begins, and notes the addresses of the weights that it reads.
"""

import functools
from unittest import mock

import pytest
import torch
from compiler_marks import MARKS
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import rotorch
from rotorch.comm.ring import RingSetup
from rotorch.comm.transports.symmetric_memory import SymmetricMemoryRing
from rotorch.core.errors import ConfigError
from rotorch.models import compiled as compiled_code
from rotorch.models.hf import causal_lm, config_from_dict
from rotorch.strategies import check_compiled, parse_parallel
from rotorch.strategies.rtp import apply
from rotorch.strategies.rtp.plan import RTP
from rotorch.testing.peer_memory import FakePeerMemory
from rotorch.testing.ranks import run_ranks

pytestmark = MARKS

QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}
"""With norms inside of attention, whose gradients are sums over slices."""


class Recordings:
    """Recordings of the stand-in."""

    def __init__(self):
        self.calls = []
        """Of this iteration: the number of each graph, and the addresses of what it read of `weights`."""
        self.iterations = []
        self.results = {}
        """By number of the call and graph: the memory of its results."""
        self.num_graphs = 0
        self.weights = []
        """Memory in which weights lie, at rest and as they visit."""

    def begin(self):
        for memory in (memory for results in self.results.values() for memory in results):
            memory.data.fill_(float("nan"))  # as the next iteration's kernels would, past all counts of versions
        self.iterations.append(self.calls)
        self.calls = []

    def compiler(self, graph, _):
        number, self.num_graphs = self.num_graphs, self.num_graphs + 1
        return make_boxed_func(functools.partial(self.run, graph, number))

    def run(self, graph, number, *inputs):
        found = graph(*inputs)
        given = {tensor.untyped_storage().data_ptr() for tensor in inputs if isinstance(tensor, torch.Tensor)}
        fresh = [
            (i, tensor)
            for i, tensor in enumerate(found)
            if isinstance(tensor, torch.Tensor)
            and tensor.is_floating_point()
            and tensor.untyped_storage().data_ptr() not in given
        ]
        shapes = tuple((tensor.shape, tensor.dtype) for _, tensor in fresh)
        key = (len(self.calls), number, shapes)
        results = self.results.setdefault(key, [torch.empty_like(tensor) for _, tensor in fresh])
        found = list(found)
        for (i, tensor), memory in zip(fresh, results, strict=True):
            memory.data.copy_(tensor)
            found[i] = memory.data
        self.calls.append((number, tuple(map(self.address, inputs))))
        return found

    def address(self, tensor):
        """The address of a tensor within the memory of weights; None of any other."""
        if not isinstance(tensor, torch.Tensor):
            return None
        for number, memory in enumerate(self.weights):
            offset = tensor.data_ptr() - memory.data_ptr()
            if tensor.numel() and 0 <= offset < memory.nbytes:
                return number, offset
        return None


def recorded_model(layout, recordings, **precision):
    """A model whose compiler is the stand-in."""
    compile = torch.compile

    def by_stand_in(function, *, dynamic, mode):
        assert mode == "reduce-overhead"
        backend = aot_autograd(fw_compiler=recordings.compiler, bw_compiler=recordings.compiler)
        return compile(function, dynamic=dynamic, backend=backend)

    compiled_code._of_class.cache_clear()
    torch._dynamo.reset()
    with rotorch.on_meta():
        module = causal_lm(config_from_dict(QWEN3, source="test"))
        module = module if precision else module.double()
    with mock.patch.object(torch, "compile", by_stand_in):
        model = rotorch.parallelize(module, layout, device="cpu", compile="reduce-overhead", **precision)
    model.materialize(seed=0)
    sharded = model.sharded
    while not hasattr(sharded, "ring"):
        sharded = sharded._inner
    recordings.weights = [*sharded.ring.slots(), *(held.local for held in model.weights.values())]
    return model


def batches(model, accumulation):
    ids = torch.randint(64, (8, 12), generator=torch.Generator().manual_seed(1))
    share = ids.chunk(model.num_batch_ranks)[model.batch_rank]
    return [{"input_ids": rows, "labels": rows} for rows in share.chunk(accumulation)]


def results(model, losses):
    grads = {name: model.full_tensor(name, grad=True) for name in model.weights}
    values = {name: model.full_tensor(name) for name in model.weights}
    model.close()
    return losses, grads, values


def steps(model, accumulation, *, between=lambda model, batch: None):
    """Losses of three steps; gradients of the last ones stay, and add up."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch, losses = batches(model, accumulation), []
    for number in range(4):
        losses.append(float(model.forward_backward(batch, accumulate=number == 3)))
        between(model, batch[0])
        if number < 2:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def plain(layout, accumulation, precision):
    with rotorch.on_meta():
        module = causal_lm(config_from_dict(QWEN3, source="test"))
        module = module if precision else module.double()
    model = rotorch.parallelize(module, layout, device="cpu", **precision).materialize(seed=0)
    return results(model, steps(model, accumulation))


def recorded(layout, accumulation, precision):
    recordings = Recordings()
    model = recorded_model(layout, recordings, **precision)

    def evaluate(model, batch):
        model.evaluate(batch)
        model.predict({"input_ids": batch["input_ids"][:, :5]})

    with mock.patch.object(torch.compiler, "cudagraph_mark_step_begin", recordings.begin):
        losses = steps(model, accumulation, between=evaluate)
        recordings.begin()
        found = results(model, losses)
    return *found, recordings.iterations[1:]


@pytest.fixture
def over_peer_memory(monkeypatch):
    """Every ring that ranks forked from here make lies in symmetric memory, that of a stand-in for CUDA."""

    def make_ring(
        _, *, mesh, numels_in_parts, later_parts, dtype, device, wire_dtype, num_visits, flat_chunks, **given
    ):
        assert given["hop_dtype"] is None
        setup = RingSetup(mesh, numels_in_parts, dtype, device=device, wire_dtype=wire_dtype, later_parts=later_parts)
        return SymmetricMemoryRing(setup, num_visits=num_visits, flat_chunks=flat_chunks, make_memory=FakePeerMemory)

    monkeypatch.setattr(apply, "make_ring", make_ring)
    monkeypatch.setattr(RTP, "on_device", lambda strategy, _: strategy)


CASES = [
    ("rtp=2[transport=send_receive]", 1, {}),  # an odd number of fetches into two slots
    ("rtp=2[transport=send_receive,visits=1]", 2, {}),  # one visit: what a graph gives is the whole sum
    pytest.param("rtp=3[transport=send_receive,ahead=2]", 1, {}, marks=pytest.mark.slow),
    pytest.param("rtp=2[transport=send_receive,recompute=slice]", 2, {}, marks=pytest.mark.slow),
    pytest.param("rtp=2[transport=send_receive,buffering=in_place]", 2, {}, marks=pytest.mark.slow),
    pytest.param("ddp=2,rtp=2[transport=send_receive]", 2, {}, marks=pytest.mark.slow),
    pytest.param("rtp=2[transport=send_receive]", 2, {"param_dtype": torch.bfloat16}, marks=pytest.mark.slow),
]


def check(layout, accumulation, precision):
    size = {"ddp=2,": 4}.get(layout[:6], int(layout.partition("rtp=")[2][0]))
    rtol, atol = (1e-9, 1e-11) if not precision else (0.1, 0.01)
    before = run_ranks(plain, layout, accumulation, precision, num_ranks=size, timeout_s=240)
    after = run_ranks(recorded, layout, accumulation, precision, num_ranks=size, timeout_s=400)
    for (losses, grads, values), (losses_2, grads_2, values_2, iterations) in zip(before, after, strict=True):
        assert losses_2 == pytest.approx(losses, rel=rtol)
        for name, grad in grads.items():
            torch.testing.assert_close(grads_2[name], grad, rtol=rtol, atol=atol)
            torch.testing.assert_close(values_2[name], values[name], rtol=rtol, atol=atol)
        training = [calls for calls in iterations if len(calls) == max(map(len, iterations))]
        assert len(training) == 4 * accumulation  # a micro-batch each; the others look only
        again = {tuple(calls) for calls in training[accumulation:]}
        # A micro-batch of a step finds everything where that of the step before did; those of one step may differ.
        assert len(again) <= accumulation
        assert any(where is not None for number, read in training[-1] for where in read)
        assert len({number for number, _ in training[-1]}) == 4  # of attention and MLP, forward and backward


@pytest.mark.parametrize(("layout", "accumulation", "precision"), CASES)
def test_steps_find_slices_where_they_were_and_nothing_outlives_a_micro_batch(layout, accumulation, precision):
    check(layout, accumulation, precision)


@pytest.mark.parametrize("options", ["", pytest.param("[transport=symmetric_memory,visits=2]", marks=pytest.mark.slow)])
def test_so_they_do_in_symmetric_memory(over_peer_memory, options):
    check(f"rtp={4 if options else 2}{options}", 1, {})


def own_loop(compiled):
    """Gradients of steps: of two calls with one backward, and of calls with a backward each; others only look."""
    recordings = Recordings()
    layout = "rtp=2[transport=send_receive,visits=1]"
    if compiled:
        model = recorded_model(layout, recordings)
    else:
        with rotorch.on_meta():
            module = causal_lm(config_from_dict(QWEN3, source="test")).double()
        model = rotorch.parallelize(module, layout, device="cpu").materialize(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = batches(model, 2)
    losses, grads = [], []
    with mock.patch.object(torch.compiler, "cudagraph_mark_step_begin", recordings.begin):
        for at_once in (True, False, True):
            one = model(**first).loss
            if not at_once:
                one.backward()
            with torch.no_grad():
                losses.append(model(**second).loss.item())
            two = model(**second).loss
            (one + two if at_once else two).backward()
            losses += [one.item(), two.item()]
            grads.append({name: model.full_tensor(name, grad=True) for name in model.weights})
            optimizer.step()
            optimizer.zero_grad()
    model.close()
    return losses, grads, len(recordings.iterations)


def test_calls_in_a_loop_of_ones_own_keep_what_a_backward_is_to_read():
    before, after = (run_ranks(own_loop, compiled, num_ranks=2, timeout_s=300) for compiled in (False, True))
    for (losses, grads, _), (losses_2, grads_2, num_iterations) in zip(before, after, strict=True):
        assert losses_2 == pytest.approx(losses, rel=1e-9)
        for step, step_2 in zip(grads, grads_2, strict=True):
            for name, grad in step.items():
                torch.testing.assert_close(step_2[name], grad, rtol=1e-9, atol=1e-11)
        # Where two backwards wait, or one, nothing begins: 1 iteration for such a step, 3 for the other one.
        assert num_iterations == 1 + 3 + 1


def between(compiled, what):
    """Gradients of a call, between which and its backward something else is asked, of this model or another one."""
    recordings, models = Recordings(), []
    layout = "rtp=2[transport=send_receive]"
    for _ in range(2):
        if compiled:
            models.append(recorded_model(layout, recordings))
        else:
            with rotorch.on_meta():
                module = causal_lm(config_from_dict(QWEN3, source="test")).double()
            models.append(rotorch.parallelize(module, layout, device="cpu").materialize(seed=0))
    model, other = models
    first, second = batches(model, 2)

    def loss_with_teacher(callee, batch, num_targets):
        loss = callee(**batch).loss
        with torch.no_grad():
            factor = float(other(**batch).loss)
        return loss * factor

    with mock.patch.object(torch.compiler, "cudagraph_mark_step_begin", recordings.begin):
        for _ in range(3):
            model.module.zero_grad()
            if what == "a teacher in the loss":
                model.forward_backward([first, second], loss=loss_with_teacher)
                continue
            loss = model(**first).loss
            if what == "evaluation":
                model.evaluate(second)
            elif what == "prediction":
                model.predict({"input_ids": second["input_ids"]})
            elif what == "a step of another model":
                other.module.zero_grad()
                other.forward_backward(second)
            else:
                with torch.no_grad():
                    other(**second)
            loss.backward()
    grads = {name: model.full_tensor(name, grad=True) for name in model.weights}
    for each in models:
        each.close()
    return grads


@pytest.mark.parametrize(
    "what",
    [
        "evaluation",
        "a teacher in the loss",
        pytest.param("prediction", marks=pytest.mark.slow),
        pytest.param("a call of another model", marks=pytest.mark.slow),
        pytest.param("a step of another model", marks=pytest.mark.slow),
    ],
)
def test_what_a_backward_is_to_read_outlives_passes_in_between(what):
    before, after = (run_ranks(between, compiled, what, num_ranks=2, timeout_s=300) for compiled in (False, True))
    for grads, grads_2 in zip(before, after, strict=True):
        for name, grad in grads.items():
            torch.testing.assert_close(grads_2[name], grad, rtol=1e-9, atol=1e-11)


def test_passes_that_wait_for_a_backward_are_told_of(monkeypatch, caplog):
    begun = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begun.append(1))
    graph = torch.nn.Identity()  # in the place of a node of one
    compiled_code.backward_is_to_come(graph)
    for _ in range(10):
        compiled_code.begin_recorded()
    (warned,) = caplog.records
    assert "8 passes have begun while the backward of an earlier one is to come" in warned.message and not begun
    compiled_code.backward_has_come(lambda of: of is graph)
    compiled_code.begin_recorded()
    assert begun == [1]


@pytest.mark.parametrize("mode", ["reduce_overhead", "max-autotune", 1, None])
def test_another_mode_is_refused(mode):
    with pytest.raises(ConfigError, match=r"compile=.*: write True, False or 'reduce-overhead'"):
        rotorch.parallelize(torch.nn.Linear(2, 2), "rtp=2", device="cpu", compile=mode)


def generated(compiled):
    compiled_code._of_class.cache_clear()
    torch.manual_seed(0)
    model = rotorch.parallelize(
        causal_lm(config_from_dict(QWEN3, source="test")).double().eval(),
        "rtp=2[transport=send_receive]",
        device="cpu",
        compile=compiled,
    )
    prompt = torch.randint(1, 64, (2, 5), generator=torch.Generator().manual_seed(1))
    ids = model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
    model.close()
    return ids.tolist(), torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_with_a_cache_forwards_are_those_of_the_model():
    """Each token is a pass of other shapes, and what a cache keeps outlives it."""
    (before, _), (after, num_graphs) = (run_ranks(generated, c, num_ranks=2)[0] for c in (False, "reduce-overhead"))
    assert after == before and num_graphs == 2  # MLPs, on the prompt and on a token


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("single", "single: its passes are not recorded as CUDA graphs. Write compile = true, or rtp"),
        ("fsdp=2", "fsdp=2: its passes are not recorded"),
        ("ddp=2", "ddp=2: it has no slices that visit. Write compile = true, or rtp"),
        ("pp=2,rtp=2", "pp=2: its passes are not recorded"),
        ("rtp=2,megatron=2", "megatron=2: its passes are not recorded"),
    ],
)
def test_other_strategies_are_refused(layout, said):
    with pytest.raises(ConfigError, match="compile = 'reduce-overhead': ") as refused:
        check_compiled(parse_parallel(layout), recorded=True)
    assert said in str(refused.value)


def test_what_torch_is_asked_for():
    """One graph for all slices and layers, in torch's own mode of that name."""
    asked = []

    def compile(function, **options):
        asked.append(options)
        return function

    def made():
        with rotorch.on_meta():
            module = causal_lm(config_from_dict(QWEN3, source="test"))
        compiled_code._of_class.cache_clear()
        with mock.patch.object(torch, "compile", compile):
            rotorch.parallelize(module, "rtp=1", device="cpu", compile="reduce-overhead").close()
        return asked

    assert run_ranks(made, num_ranks=1) == [[{"dynamic": False, "mode": "reduce-overhead"}] * 2]
