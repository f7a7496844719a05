"""Pipelines as they run: chunks, units that do not divide a step, gathers counted, weight gradients put off."""

import json
import math
import time
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from torch import nn

import rotorch
from rotorch._torch_private import TorchDispatchMode
from rotorch.comm.collectives import all_reduce_sum
from rotorch.comm.meter import Meter
from rotorch.core.errors import ConfigError, HeardFailure, RankFailure
from rotorch.core.traffic import Kind
from rotorch.hold.pipeline_step import PipelineStep
from rotorch.models.describe import describe
from rotorch.models.hf import causal_lm, load_config
from rotorch.ops.deferred_weight_gradients import DeferredWeightGradients
from rotorch.pipelining.actions import ActionKind
from rotorch.planner.prediction import predict
from rotorch.shard.materialize import take_recipes
from rotorch.shard.storages import owned_bytes
from rotorch.strategies import parse_parallel
from rotorch.testing.arithmetic import exact_arithmetic, widen
from rotorch.testing.compare import gradient_errors
from rotorch.testing.ranks import run_ranks
from rotorch.testing.reference import fill, reference_step
from rotorch.testing.verify import verify
from rotorch.train.checkpoint.saving import load, save
from rotorch.train.optim import clip_gradients, squared_norm_share
from rotorch.train.state import TrainState

NUM_MICRO_BATCHES = 5

pytestmark = pytest.mark.usefixtures("warm")


@pytest.fixture(scope="module")
def five_layers(tiny, tmp_path_factory):
    """An odd number of layers of two kinds, embedding and head tied."""
    values = json.loads(Path(tiny("qwen3")).read_text("utf-8"))
    kinds = values["layer_types"]
    path = tmp_path_factory.mktemp("five") / "config.json"
    path.write_text(json.dumps({**values, "num_hidden_layers": 5, "layer_types": [*kinds, *kinds][:5]}))
    return str(path)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("parallel", "micro_batches"),
    [
        ("pp=3", 5),
        ("zeropp=2x1[chunks=2,unit=2,recompute=block]", 5),
        ("zeropp=2x2[inner=rtp,unit=2]", 3),
        ("pp=2[schedule=zbv,layers=1-2-1-1]", 3),
        ("pp=2[layers=3-2,recompute=2-0]", 3),
        ("pp=2[layers=2.5-2.5,recompute=block]", 3),
        ("pp=2[schedule=zbv,layers=0.5-1-2-1.5]", 3),
        ("zeropp=2x2[layers=1.5-3.5,recompute=1-2]", 3),
        pytest.param("zeropp=2x2[chunks=2,recompute=1-0-1-0]", 3, marks=SLOW),
        ("pp=2,atp=1x2", 3),  # a part of the features of a weight of two stages
        pytest.param("pp=2[schedule=zb_h1],atp=2x2[order=row_first]", 3, marks=SLOW),
        pytest.param("pp=2,tesseract=1x1x2[zero=true]", 3, marks=SLOW),
        pytest.param("pp=2[schedule=interleaved_1f1b,layers=2-1-1-1],summa=2x2", 4, marks=SLOW),
        pytest.param("pp=2[schedule=interleaved_1f1b,layers=2-1-1-1],rtp=2", 4, marks=SLOW),
        pytest.param("pp=2[schedule=looped_bfs,unit=2],fsdp=2", 3, marks=SLOW),
        pytest.param("pp=2[schedule=zbv,unit=2],fsdp=2", 5, marks=SLOW),
        pytest.param("pp=2[schedule=interleaved_1f1b]", 4, marks=SLOW),
        pytest.param("pp=2[schedule=looped_bfs]", 3, marks=SLOW),
        pytest.param("pp=2[schedule=zbv],rtp=2", 3, marks=SLOW),
        pytest.param("zeropp=2x2[inner=rtp,chunks=2]", 2, marks=SLOW),
        pytest.param("zeropp=4x1", 9, marks=SLOW),
        pytest.param("ddp=2,zeropp=2x1[chunks=2,unit=2]", 3, marks=SLOW),
        pytest.param("ddp=2,zeropp=1x2[inner=rtp,chunks=2]", 2, marks=SLOW),
    ],
)
def test_chunks_odd_layers_and_any_number_of_micro_batches_are_exact(five_layers, parallel, micro_batches):
    report = verify(five_layers, parallel=parallel, micro_batches=micro_batches, steps=1, timeout_s=300)
    assert report.ok, (report.verdict, report.first_divergence)
    assert report.num_modules_compared > 50


@pytest.mark.parametrize(
    "parallel",
    [
        "pp=2[layers=2.5-2.5],rtp=2",
        pytest.param("pp=2[layers=1.5-3.5],rtp=2[transport=send_receive]", marks=SLOW),
        pytest.param("pp=2[layers=1.5-3.5],rtp=2[recompute=slice]", marks=SLOW),
        "pp=2[layers=2.5-2.5],fsdp=2",
        "pp=2[layers=3.5-1.5],megatron=2",
        pytest.param("pp=2[layers=2.5-2.5],atp=1x2", marks=SLOW),
        pytest.param("pp=2[layers=2.5-2.5],tesseract=2x2x1", marks=SLOW),
        pytest.param("pp=2[schedule=interleaved_1f1b,halves=true],fsdp=2,megatron=2", marks=SLOW),
    ],
)
def test_stages_that_end_inside_of_layers_are_exact_around_other_strategies(five_layers, parallel):
    report = verify(five_layers, parallel=parallel, micro_batches=4, steps=1, timeout_s=300)
    assert report.ok, (report.verdict, report.first_divergence)
    assert report.num_modules_compared > 25


def layers_run(path, parallel):
    """Runs in a step of each layer of this rank's stages, by number."""
    model = rotorch.parallelize(build(path), parallel, device="cpu").materialize(seed=1)
    ran = Counter()
    for number, layer in enumerate(model.module.model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, number=number: ran.update([number]))
    batch = batch_of(model.module.config, num_rows=4)
    model.forward_backward([{name: rows[k : k + 2] for name, rows in batch.items()} for k in range(2)])
    return dict(ran)


def test_the_first_layers_of_each_stage_run_again_as_many_as_are_written(five_layers):
    first, second = run_ranks(layers_run, five_layers, "pp=2[layers=3-2,recompute=2-0]", num_ranks=2)
    assert {n: ran for n, ran in first.items() if ran} == {0: 4, 1: 4, 2: 2}
    assert {n: ran for n, ran in second.items() if ran} == {3: 2, 4: 2}
    with pytest.raises(ConfigError, match=r"computes 4 layers of stage 0 again, which has 3 whole ones of 5"):
        parse_parallel("pp=2[layers=3-2,recompute=4-0]")[0].check(describe(causal_lm(load_config(five_layers))))


def messages_without_debts(path):
    """Numbers of deferred additions at each message: other ranks of the ring may be waiting for them."""
    model = rotorch.parallelize(build(path), "pp=2,rtp=2[transport=shared_memory]", device="cpu").materialize(seed=1)
    send, sent = PipelineStep._message, []

    def nothing_is_kept_back(self, action, table):
        sent.append(len(self._inner.ring._deferred))
        send(self, action, table)

    PipelineStep._message = nothing_is_kept_back
    batch = batch_of(model.module.config, num_rows=8)
    mine = {name: rows.tensor_split(2)[model.batch_rank] for name, rows in batch.items()}
    model.forward_backward([{name: rows[k : k + 1] for name, rows in mine.items()} for k in range(4)])
    return sent


def test_no_addition_is_kept_back_while_a_rank_waits_for_another_stage(five_layers):
    for sent in run_ranks(messages_without_debts, five_layers, num_ranks=4):
        assert len(sent) >= 8 and not any(sent)


def build(path):
    with rotorch.on_meta():
        return widen(causal_lm(load_config(path))).train()


def batch_of(config, *, num_rows):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(config.vocab_size, (num_rows, 6), generator=generator)
    labels = ids.clone()
    labels[::2, 3] = -100
    return {"input_ids": ids, "labels": labels}


def step(path, parallel):
    """The largest gradient error of a step, and what the meter counted in another one."""
    model = rotorch.parallelize(build(path), parallel, device="cpu").materialize(seed=1)
    batch = batch_of(model.module.config, num_rows=NUM_MICRO_BATCHES * model.num_batch_ranks)
    mine = {name: rows.tensor_split(model.num_batch_ranks)[model.batch_rank] for name, rows in batch.items()}
    micro_batches = [{name: rows[k : k + 1] for name, rows in mine.items()} for k in range(NUM_MICRO_BATCHES)]
    watched = build(path)
    reference = widen(causal_lm(load_config(path))).train()
    fill(reference, spec=describe(watched), recipes=take_recipes(watched), seed=1)
    with exact_arithmetic():
        loss = float(model.forward_backward(micro_batches))
        whole_loss = float(reference_step(reference, batch))
    theirs = {name: p.grad for name, p in reference.named_parameters()}
    error = max(gradient_errors(model.weights, theirs).values())
    with Meter() as meter:
        model.forward_backward(micro_batches, accumulate=True)
    logits = model.next_token_logits(batch["input_ids"][:1])
    with torch.no_grad():
        expected = reference.eval()(input_ids=batch["input_ids"][:1]).logits[:, -1]
    model.close()
    same = torch.allclose(logits, expected.float(), rtol=1e-6)
    return error, abs(loss - whole_loss) / whole_loss, dict(meter.num_messages), same


@pytest.mark.parametrize(
    ("parallel", "gathers", "sums"),
    [
        # Two whole units and a short one; the last stage has backwards of a unit between its forwards.
        ("zeropp=2x2[unit=2]", (2 * 3, 4), 3),
        pytest.param("pp=2[schedule=gpipe,unit=5],fsdp=2", (2, 2), 1, marks=pytest.mark.slow),
        pytest.param("pp=2[unit=1],fsdp=2[reshard=false]", (1, 1), 5, marks=pytest.mark.slow),
    ],
)
def test_a_stage_is_gathered_at_most_twice_per_unit_and_summed_once(tiny, parallel, gathers, sums):
    for rank, (error, loss_error, counted, same) in enumerate(run_ranks(step, tiny("llama"), parallel, num_ranks=4)):
        assert error <= 1e-10 and loss_error <= 1e-10
        assert (counted[Kind.ALL_GATHER], counted[Kind.REDUCE_SCATTER]) == (gathers[rank // 2], sums)
        assert same


def go_on(path, layouts, directory):
    """Two steps under one layout, saved after the first; the second again under the other.

    Losses of both, and squared gradient norms before and after they are clipped to half.
    """
    found, saved = [], directory
    for parallel in layouts:
        with rotorch.on_meta():
            module = causal_lm(load_config(path)).train()
        model = rotorch.parallelize(module, parallel, device="cpu").materialize(seed=1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        state = TrainState(model=model, optimizer=optimizer)
        batch = batch_of(model.module.config, num_rows=4)
        mine = {name: rows.tensor_split(model.num_batch_ranks)[model.batch_rank] for name, rows in batch.items()}
        if found:
            load(saved, state)
        else:
            model.forward_backward(mine)
            optimizer.step()
            optimizer.zero_grad()
            saved = save(directory, state, keep=1)
        loss = float(model.forward_backward(mine))
        norms = [squared_norm(model)]
        clip_gradients(model, norm=math.sqrt(norms[0]), clip_norm=math.sqrt(norms[0]) / 2)
        found.append((loss, *norms, squared_norm(model)))
        model.close()
    return found


def squared_norm(model):
    share = torch.tensor(squared_norm_share(model), dtype=torch.float64)
    return float(all_reduce_sum(share, mesh=model.mesh))


@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        ("llama", ("pp=2[schedule=zb_h1]", "fsdp=2")),
        ("qwen3", ("ddp=2,zeropp=2x1", "fsdp=4")),  # replicas of what is tied over two stages count once
        ("qwen3", ("pp=2,atp=1x2", "fsdp=4")),  # norms are the same on both ranks of a stage, and count once
        pytest.param("qwen3", ("fsdp=4", "ddp=2,zeropp=2x1"), marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_under_another_layout(tiny, tmp_path, model, layouts):
    num_ranks = 4 if "fsdp=4" in layouts else 2
    for first, second in run_ranks(go_on, tiny(model), layouts, tmp_path, num_ranks=num_ranks):
        assert first == pytest.approx(second, rel=1e-5)
        assert first[2] == pytest.approx(first[1] / 4, rel=1e-5)


def fewer_micro_batches_than_a_unit(path):
    model = rotorch.parallelize(build(path), "zeropp=1x1[unit=2]", device="cpu").materialize(seed=1)
    batch = batch_of(model.module.config, num_rows=2)
    with pytest.raises(ConfigError, match="a unit of 2 micro-batches, but a step has 1"):
        model.forward_backward(batch)
    assert float(model.forward_backward([batch, batch])) > 0
    model.close()


def test_a_step_with_fewer_micro_batches_than_a_unit_is_refused(tiny):
    run_ranks(fewer_micro_batches_than_a_unit, tiny("llama"), num_ranks=1)


def test_it_is_refused_before_a_run_starts():
    (strategy,) = parse_parallel("pp=2[unit=4]")
    strategy.check_micro_batches(4)
    with pytest.raises(ConfigError, match="a unit of 4 micro-batches, but a step has 2"):
        strategy.check_micro_batches(2)


class Broken(Exception):
    pass


def broken_loss(module, batch, num_targets):
    module(**batch)  # ends here in the first stage
    raise Broken


def breaks_off_at_the_end(path):
    """Errors of a training step and an evaluation, and True if the ranks agree in a prediction after that."""
    model = rotorch.parallelize(build(path), "pp=2", device="cpu", loss=broken_loss).materialize(seed=1)
    batch, raised = batch_of(model.module.config, num_rows=2), []
    for run in (model.forward_backward, model.evaluate):
        try:
            run(batch)
        except (Broken, RankFailure) as error:
            raised.append(type(error))
    logits = model.predict({"input_ids": batch["input_ids"]}).logits
    model.close()
    return raised, logits.double().sum().item()


def test_all_ranks_raise_if_the_last_stage_does(tiny):
    (first, mine), (last, theirs) = run_ranks(breaks_off_at_the_end, tiny("llama"), num_ranks=2, timeout_s=60)
    assert (first, last) == ([HeardFailure] * 2, [Broken] * 2)
    assert mine == theirs


def breaks_off_beside_a_gather(path):
    """Losses of a step, and of one after another that raised on both ranks while a gather was under way."""
    model = rotorch.parallelize(build(path), "zeropp=1x2[chunks=2]", device="cpu").materialize(seed=1)
    batches, calls = [batch_of(model.module.config, num_rows=2)] * 4, []
    good = float(model.forward_backward(batches))

    def hook(*_):
        calls.append(1)
        if len(calls) == 3:
            raise Broken

    handle = model.module.model.layers[0].register_forward_pre_hook(hook)
    with suppress(Broken):
        model.forward_backward(batches, accumulate=True)
    assert len(calls) == 3
    handle.remove()
    again = float(model.forward_backward(batches, accumulate=True))
    model.close()
    return good, again


def test_a_step_goes_on_after_one_that_broke_off_beside_a_gather(tiny):
    for good, again in run_ranks(breaks_off_beside_a_gather, tiny("llama"), num_ranks=2, timeout_s=60):
        assert good == again


def clipped(path):
    """Messages of torch's own clipping, the norm that it finds, and the norm after it."""
    model = rotorch.parallelize(build(path), "zeropp=2x2", device="cpu").materialize(seed=1)
    model.forward_backward(batch_of(model.module.config, num_rows=2))
    with Meter() as meter:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    squares = sum(model.full_tensor(name, grad=True).square().sum() for name in model.weights)
    model.close()
    return dict(meter.num_messages), float(norm), float(squares) ** 0.5


def test_torchs_own_clipping_sends_one_message_over_stages_and_shards(tiny):
    for sent, norm, after in run_ranks(clipped, tiny("qwen3"), num_ranks=4):
        assert sent == {Kind.ALL_REDUCE: 1}
        assert norm > 1.0 and after == pytest.approx(1.0, rel=1e-5)


TIED = "model.embed_tokens.weight"


def held_of_a_tied_weight(path, parallel):
    """Bytes of the tied weight before a step and after, and True if it has a gradient."""
    model = rotorch.parallelize(build(path), parallel, device="cpu").materialize(seed=1)
    held = model.sharded._inner.weights[TIED]
    before = held.local.untyped_storage().nbytes()
    model.forward_backward(batch_of(model.module.config, num_rows=2))
    after = held.local.untyped_storage().nbytes()
    model.close()
    return before, after, held.parameter.grad is not None


@pytest.mark.parametrize("parallel", ["pp=2", "zeropp=2x1", "pp=2,megatron=1"])
def test_a_tied_head_is_borrowed_for_a_step(tiny, parallel):
    owner, borrower = run_ranks(held_of_a_tied_weight, tiny("qwen3"), parallel, num_ranks=2)
    assert owner[0] == owner[1] > 0 and owner[2]
    assert borrower == (0, 0, False)


def losses_with_a_late_borrower(path, parallel):
    """Losses of three steps in which one rank of the last stage has the values of its borrowed weight late."""
    model = rotorch.parallelize(build(path), parallel, device="cpu").materialize(seed=1)
    if model.mesh.size() > 1 and model.mesh.get_rank() == model.mesh.size() - 2:
        messages = model.sharded._messages
        exchange = messages.exchange

        def late(outgoing, incoming):
            before = [tensor.clone() for _, tensor in incoming]
            exchange(outgoing, incoming)
            came = [tensor.clone() for _, tensor in incoming]
            for values, wait in ((before, 0.5), (came, 0.0)):
                for (_, tensor), value in zip(incoming, values, strict=True):
                    tensor.copy_(value)
                time.sleep(wait if incoming else 0.0)

        messages.exchange = late
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batch = batch_of(model.module.config, num_rows=2)
    mine = {name: rows.tensor_split(model.num_batch_ranks)[model.batch_rank] for name, rows in batch.items()}
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(float(model.forward_backward(mine)))
        optimizer.step()
    model.close()
    return losses


@pytest.mark.parametrize(
    ("parallel", "num_ranks"), [("pp=2,rtp=2", 4), pytest.param("pp=2,summa=2x2", 8, marks=pytest.mark.slow)]
)
def test_no_rank_reads_a_borrowed_weight_of_another_one_before_all_of_them_have_it(tiny, parallel, num_ranks):
    (alone,) = run_ranks(losses_with_a_late_borrower, tiny("qwen3"), "single", num_ranks=1)
    for losses in run_ranks(losses_with_a_late_borrower, tiny("qwen3"), parallel, num_ranks=num_ranks):
        assert losses == pytest.approx(alone, rel=1e-6)


def held_at_rest(path, parallel):
    """Bytes of weights and gradients, as they are and as the plan has them."""
    model = rotorch.parallelize(build(path), parallel, device="cpu").materialize(seed=1)
    model.forward_backward(batch_of(model.module.config, num_rows=2))
    held = owned_bytes([h.local for h in model.weights.values()]) + owned_bytes(model.sharded.gradients())
    plan = predict(describe(build(path)), strategies=parse_parallel(parallel), rank=model.mesh.get_rank())
    model.close()
    return held, plan.ledger["weights"] + plan.ledger["gradients"]


def test_a_tied_head_in_a_ring_stays_and_the_plan_says_so(tiny):
    parallel = "pp=2,rtp=2[transport=send_receive]"
    for held, said in run_ranks(held_at_rest, tiny("qwen3"), parallel, num_ranks=4):
        assert held == said


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


def products_of_actions(path, parallel):
    """Number of products in all actions of each kind in a step."""
    model = rotorch.parallelize(build(path), parallel, device="cpu").materialize(seed=1)
    found = Counter()

    @contextmanager
    def watch(action):
        with Products() as products:
            yield
        found[action.kind] += products.number

    batch = batch_of(model.module.config, num_rows=1)
    with model.sharded.watched(watch):
        model.forward_backward([batch] * 2)
    model.close()
    return found


@pytest.mark.parametrize(("inside", "put_off"), [("", True), (",megatron=1", False), (",rtp=1", False)])
def test_a_strategy_inside_computes_weight_gradients_with_those_of_inputs(tiny, inside, put_off):
    (found,) = run_ranks(products_of_actions, tiny("llama"), f"pp=1[schedule=zb_h1]{inside}", num_ranks=1)
    assert found[ActionKind.BACKWARD_INPUT] > 0
    assert (found[ActionKind.BACKWARD_WEIGHT] > 0) == put_off


def test_gradients_put_off_are_those_of_autograd():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2, bias=False)).double()
    xs = [torch.randn(5, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    for x in xs:
        module(x).square().sum().backward()
    expected = [p.grad for p in module.parameters()] + [x.grad for x in xs]
    for tensor in (*module.parameters(), *xs):
        tensor.grad = None
    deferred = DeferredWeightGradients(module)
    for number, x in enumerate(xs):
        with deferred.deferring(0, number):
            module(x).square().sum().backward()
        assert module[0].weight.grad is None and module[2].weight.grad is not None
    for number in range(2):
        deferred.compute(0, number)
    for found, wanted in zip([*module.parameters(), *xs], expected, strict=True):
        torch.testing.assert_close(found.grad, wanted)
