"""Refusals, in one line on all ranks, of loops that would be silently wrong; and losses per call."""

import copy
import pickle
from functools import cache, partial

import pytest
import torch
from idioms import Loop, cross_entropy
from lockstep import build
from torch import nn

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.models.hf import load_config
from rotorch.parallelize import load_step_code
from rotorch.testing.compare import gradient_errors
from rotorch.testing.ranks import run_ranks

MESSAGES = "rtp=2[transport=send_receive]"
LAYOUTS = ("ddp=2", "fsdp=2", "rtp=2", MESSAGES, "megatron=2")
SLOW = ("fsdp=2", "rtp=2")
"""Dangers are refused by code that knows no layout; only that of a hook looks at how a model is cut."""

OF_DANGERS = [pytest.param(layout, marks=pytest.mark.slow if layout in SLOW else ()) for layout in LAYOUTS]


@pytest.fixture(scope="module")
def config(tiny):
    config = load_config(tiny("llama"))
    config.num_hidden_layers, config.vocab_size = 2, 91
    return config


@pytest.fixture(scope="module")
def ranks(config):
    """Findings of each rank: of calls that are right by layout, and of what no layout changes."""
    load_step_code(["ddp", "fsdp", "rtp", "megatron", "pp"])
    return run_ranks(everything, config, num_ranks=2, timeout_s=300)


@pytest.fixture(scope="module")
def refused(config):
    """Returns the messages of each rank, by danger, under a layout."""
    load_step_code(["ddp", "fsdp", "rtp", "megatron"])

    @cache
    def of(layout):
        return run_ranks(refusals, config, layout, num_ranks=2, timeout_s=300)

    return of


def refusal(call):
    try:
        call()
    except ConfigError as error:
        return str(error)
    return None


def data_that_is_assigned(loop):
    parameter = next(loop.model.parameters())
    parameter.data = parameter.data.clone()
    loop.model(**loop.batch(0))


def a_weight_that_is_replaced(loop):
    loop.model.model.norm.weight = nn.Parameter(torch.ones(loop.model.config.hidden_size, dtype=torch.float64))
    loop.model(**loop.batch(0))


def a_part_that_came_later(loop):
    loop.model.value = nn.Linear(loop.model.config.hidden_size, 1).requires_grad_(False)
    loop.model(**loop.batch(0))  # of no concern while nothing of it is trained
    loop.model.reward = nn.Linear(loop.model.config.hidden_size, 1)
    loop.model(**loop.batch(0))


def a_part_that_is_unfrozen_later(loop):
    loop.model.value = nn.Linear(loop.model.config.hidden_size, 1).requires_grad_(False)
    loop.model(**loop.batch(0))
    loop.model.full_state_dict()
    loop.model.value.requires_grad_(True)
    loop.model(**loop.batch(0))


def a_part_that_is_replaced(loop):
    config = loop.model.config
    loop.model.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False).double()
    loop.model(**loop.batch(0))


def wrapped_by_ddp(loop):
    nn.parallel.DistributedDataParallel(loop.model)


def parameters_of_a_call(loop):
    others = {name: parameter.detach().clone() for name, parameter in loop.model.named_parameters()}
    torch.func.functional_call(loop.model, others, (), loop.batch(0))


def a_pickle(loop):
    pickle.dumps(loop.model)


def a_copy_on_one_rank(loop):
    if torch.distributed.get_rank() == 0:
        copy.deepcopy(loop.model)
    else:
        loop.model(**loop.batch(0))


def embeddings_of_another_size(loop):
    loop.model.resize_token_embeddings(loop.model.config.vocab_size)  # changes nothing
    loop.model.resize_token_embeddings(loop.model.config.vocab_size + 3)


def a_hook_inside_of_what_is_cut(loop):
    seen = []
    part = loop.model.model.layers[0].mlp.gate_proj
    handle = part.register_forward_hook(lambda _, __, output: seen.append(output.shape[-1]))
    try:
        loop.model(**loop.batch(0))
    finally:
        handle.remove()
    assert seen == [loop.model.config.intermediate_size], seen  # whole, once


def a_gradient_of_a_gradient(loop):
    given = torch.randn(2, 5, loop.model.config.hidden_size, dtype=torch.float64).requires_grad_()
    torch.autograd.grad(loop.model(inputs_embeds=given).logits.sum(), [given], create_graph=True)


def gradients_of_some_weights(loop):
    some = list(loop.model.parameters())[:2]
    loop.model(**loop.batch(0)).loss.backward(inputs=some)


def gradients_of_weights_by_autograd(loop):
    torch.autograd.grad(loop.model(**loop.batch(0)).logits.sum(), list(loop.model.parameters()))


def gradients_of_weights_that_may_be_unused(loop):
    output = loop.model(**loop.batch(0))
    torch.autograd.grad(output.loss, list(loop.model.parameters())[-1:], allow_unused=True)


def means_that_add_up(loop):
    for part in range(2):
        loop.model.forward_backward(loop.batch(0, part))


def a_mean_that_adds_to_other_gradients(loop):
    loop.model(**loop.batch(0)).loss.backward()
    loop.model.forward_backward(loop.batch(0, 1))


def one_rank_that_accumulates(loop):
    loop.model.forward_backward(loop.batch(0))
    loop.model.forward_backward(loop.batch(0, 1), accumulate=torch.distributed.get_rank() == 1)


def spread_twice(loop):
    rotorch.parallelize(loop.model, "ddp=2", device="cpu")


def compiled_in_place_before(loop):
    plain = build(loop.model.config, seed=1)
    plain.compile(backend="eager")
    rotorch.parallelize(plain, "ddp=2", device="cpu")


def a_base_called_by_itself(loop):
    loop.model.model(input_ids=loop.batch(0)["input_ids"])


def a_head_called_by_itself(loop):
    loop.model.lm_head(torch.ones(1, 4, loop.model.config.hidden_size, dtype=torch.float64))


def embeddings_called_by_themselves(loop):
    loop.model.get_input_embeddings()(loop.batch(0)["input_ids"])


def a_layer_called_by_itself(loop):
    x = torch.ones(1, 4, loop.model.config.hidden_size, dtype=torch.float64)
    loop.model.model.layers[0](x)


def a_projection_called_by_itself(loop):
    loop.model.model.layers[0].self_attn.q_proj(torch.ones(1, 4, loop.model.config.hidden_size, dtype=torch.float64))


def an_optimizer_from_before(loop):
    plain = build(loop.model.config, seed=1)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    rotorch.parallelize(plain, loop.model.strategies, device="cpu")
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    optimizer.step()


def compiled(config):
    """Refusals of torch.compile around a parallel model, in it, and before it."""
    model = rotorch.parallelize(build(config, seed=1), "rtp=2", device="cpu")
    loop = Loop(model, None, model.batch_rank, config.vocab_size)

    @torch.compile(backend="eager")
    def step(batch):
        return model(**batch).loss

    calls = (
        lambda: torch.compile(model, backend="eager")(**loop.batch(0)),
        lambda: model.compile(backend="eager"),
        lambda: step(loop.batch(0)),
        lambda: rotorch.parallelize(torch.compile(build(config, seed=1)), "rtp=2", device="cpu"),
    )
    told = [refusal(call) for call in calls]
    model(**loop.batch(0)).loss.backward()  # goes on as if nothing had been
    return told


def forward_itself(config, layout):
    """Differences of loss and gradients between a call of the model and one of its forward."""
    found = []
    for call in (lambda model: model, lambda model: model.forward):
        model = rotorch.parallelize(build(config, seed=1), layout, device="cpu")
        loss = call(model)(**Loop(model, None, model.batch_rank, config.vocab_size).batch(0)).loss
        loss.backward()
        found.append((float(loss.detach()), [model.full_tensor(name, grad=True) for name in model.weights]))
    (loss, grads), (other_loss, other_grads) = found
    return abs(loss - other_loss), max(float((a - b).abs().max()) for a, b in zip(grads, other_grads, strict=True))


ASKS_FOR_WEIGHTS = "torch.autograd.grad cannot ask for gradients of weights here"
DANGERS = {
    wrapped_by_ddp: "its gradients are means over ranks already. Call the model itself",
    parameters_of_a_call: "torch.func.functional_call",
    compiled_in_place_before: "the model is compiled",
    a_base_called_by_itself: "model.model(...) is called by itself",
    a_head_called_by_itself: "model.lm_head(...) is called by itself",
    embeddings_called_by_themselves: "model.model.embed_tokens(...) is called by itself",
    a_layer_called_by_itself: "model.model.layers.0(...) is called by itself",
    a_projection_called_by_itself: "model.model.layers.0.self_attn.q_proj(...) is called by itself",
    data_that_is_assigned: "data was assigned: training would go on with the old values",
    a_weight_that_is_replaced: "was replaced by another object after parallelize",
    a_part_that_came_later: "'reward.weight' was put into the model after parallelize",
    a_part_that_is_unfrozen_later: "'value.weight' was put into the model after parallelize",
    a_part_that_is_replaced: "the part of the model with 'lm_head.weight' was taken out or replaced",
    a_pickle: "spread over ranks cannot be pickled. Write torch.save(model.full_state_dict()",
    a_copy_on_one_rank: "rank 0 copies the model, rank 1 calls the model",
    embeddings_of_another_size: "LlamaForCausalLM that is spread over ranks: each has parts of the rows",
    a_hook_inside_of_what_is_cut: "would see a slice of its output. Hook 'model.layers.0.mlp'",
    a_gradient_of_a_gradient: "create_graph=True",
    gradients_of_some_weights: ASKS_FOR_WEIGHTS,
    gradients_of_weights_by_autograd: ASKS_FOR_WEIGHTS,
    gradients_of_weights_that_may_be_unused: ASKS_FOR_WEIGHTS,
    means_that_add_up: "gradients of an earlier call are still there",
    a_mean_that_adds_to_other_gradients: "or write accumulate=True",
    one_rank_that_accumulates: "rank 0 calls forward_backward, rank 1 calls forward_backward(accumulate=True)",
    spread_twice: "is parallel already",
    an_optimizer_from_before: "SGD was made before parallelize, over parameters that the model has no more",
}


def refusals(config, layout):
    told = {}
    for danger in DANGERS:
        model = rotorch.parallelize(build(config, seed=1), layout, device="cpu")
        loop = Loop(model, None, model.batch_rank, config.vocab_size)
        told[danger.__name__] = refusal(partial(danger, loop))
    return told


def everything(config):
    told = {}
    for layout in LAYOUTS:
        told[layout, "pairs"] = pairs(config, layout)
        told[layout, "autocast"] = autocast(config, layout)
        told[layout, "added"] = added(config, layout)
        told[layout, "scaled"] = scaled(config, layout)
        told[layout, "forward"] = forward_itself(config, layout)
    told["compiled"] = compiled(config)
    model = rotorch.parallelize(build(config, seed=1), "pp=2", device="cpu")
    told["pp", "means"] = refusal(lambda: [model.forward_backward(Loop(None, None, 0, 90).batch(0)) for _ in range(2)])
    model = rotorch.parallelize(build(config, seed=1), "pp=2", device="cpu")
    told["pp"] = refusal(lambda: model(input_ids=torch.ones(1, 4, dtype=torch.int64)))
    half = rotorch.parallelize(build(config, seed=1).half(), "ddp=2", device="cpu")
    told["float16"] = refusal(lambda: half.forward_backward({}))
    return told


def scaled(config, layout):
    """By how much gradients differ that a scaler has scaled and unscaled, and whether it skips a step of infinities."""
    model = rotorch.parallelize(build(config, seed=1).float(), layout, device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = Loop(model, None, model.batch_rank, config.vocab_size).batch(0)
    model(**batch).loss.backward()
    expected = [p.grad.clone() for p in model.parameters()]
    optimizer.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(model(**batch).loss).backward()
    scaler.unscale_(optimizer)
    off = max(float((p.grad - g).to_local().abs().max()) for p, g in zip(model.parameters(), expected, strict=True))
    optimizer.zero_grad()
    before = [p.detach().clone() for p in model.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(model(**batch).loss * (float("inf") if torch.distributed.get_rank() == 1 else 1.0)).backward()
    scaler.step(optimizer)
    kept = all(bool((p == b).to_local().all()) for p, b in zip(model.parameters(), before, strict=True))
    model.close()
    return off, kept


def added(config, layout):
    """Error of the sum of two calls that may accumulate, against each alone, the second one over zeros."""
    model = rotorch.parallelize(build(config, seed=1), layout, device="cpu")
    batches = [Loop(model, None, model.batch_rank, config.vocab_size).batch(0, part) for part in range(2)]
    alone = []
    for batch in batches:
        model.forward_backward(batch)
        alone.append([p.grad.to_local().clone() for p in model.parameters()])
        model.zero_grad(set_to_none=False)
    for batch in batches:
        model.forward_backward(batch, accumulate=True)
    both = [p.grad.to_local() for p in model.parameters()]
    model.close()
    return max(float((g - a - b).abs().max()) for g, a, b in zip(both, *alone, strict=True))


def autocast(config, layout):
    """Error of a call's gradients under autocast against one process, and the dtype of its logits."""
    model, plain = (
        rotorch.parallelize(build(config, seed=1).float(), layout, device="cpu"),
        build(config, seed=1).float(),
    )
    for share in range(model.num_batch_ranks):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = plain(**Loop(plain, None, share, config.vocab_size).batch(0)).loss
        (loss / model.num_batch_ranks).backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(**Loop(model, None, model.batch_rank, config.vocab_size).batch(0))
    output.loss.backward()
    errors = gradient_errors(model.weights, {name: p.grad for name, p in plain.named_parameters()})
    dtype = output.logits.detach().dtype  # now they are made
    model.close()
    return max(errors.values()), dtype


def pairs(config, layout):
    """A loss per call, on logits in lists, which gives logits beside it."""

    def loss(module, batch, num_targets):
        logits = module(input_ids=batch["input_ids"]).logits
        twice = torch.cat([logits, logits])
        labels = torch.cat([batch["labels"], batch["labels"]])
        return cross_entropy(twice, labels, reduction="sum") / (2 * num_targets), {"logits": logits}

    model = rotorch.parallelize(build(config, seed=1), layout, device="cpu")
    batches = [Loop(model, None, model.batch_rank, config.vocab_size).batch(0, part) for part in range(2)]
    expected, gradients = float(model.forward_backward(batches)), [p.grad.clone() for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    found, beside = model.forward_backward(batches, loss=loss)
    off = max(float((p.grad - g).to_local().abs().max()) for p, g in zip(model.parameters(), gradients, strict=True))
    model.close()
    return abs(float(found) - expected), off, [tuple(each["logits"].shape) for each in beside]


@pytest.mark.parametrize("layout", OF_DANGERS)
@pytest.mark.parametrize("danger", DANGERS, ids=lambda danger: danger.__name__)
def test_a_danger_is_refused_or_right(refused, layout, danger):
    for told in refused(layout):
        found = told[danger.__name__]
        if danger is a_hook_inside_of_what_is_cut and layout not in (MESSAGES, "megatron=2"):
            assert found is None
        else:
            assert found is not None and DANGERS[danger] in found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loss_per_call_may_give_more_than_the_loss(ranks, layout):
    for told in ranks:
        loss, gradients, shapes = told[layout, "pairs"]
        assert loss < 1e-6 and gradients < 1e-6  # norms and losses in float32, as the model asks for it
        assert shapes == [(2, 10, 91)] * 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_autocast_around_a_call_is_that_of_one_process(ranks, layout):
    """To bfloat16's rounding, which differs with the order of sums; without autocast logits would be float32."""
    for told in ranks:
        off, dtype = told[layout, "autocast"]
        assert off < 0.05 and dtype == torch.bfloat16


@pytest.mark.parametrize("layout", LAYOUTS)
def test_means_of_several_calls_add_up_if_that_is_asked_for(ranks, layout):
    for told in ranks:
        assert told[layout, "added"] < 1e-6


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_scaled_loss_gives_the_same_gradients_and_no_rank_steps_where_one_overflows(ranks, layout):
    for told in ranks:
        off, kept = told[layout, "scaled"]
        assert off < 1e-5 and kept


def test_pipelines_and_float16_are_refused_in_one_line(ranks):
    for told in ranks:
        assert "write model.forward_backward(micro_batches, loss=...)" in told["pp"]
        assert DANGERS[means_that_add_up] in told["pp", "means"]
        assert "torch.amp.GradScaler" in told["float16"]


def test_torch_compile_is_refused_by_name(ranks):
    for told in ranks:
        around, within, in_a_function, before = told["compiled"]
        assert all("compile=True), which compiles" in text for text in (around, within, in_a_function))
        assert before is not None and "compile=True" in before and "\n" not in before


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_s_forward_is_a_call_of_the_model(ranks, layout):
    for told in ranks:
        assert told[layout, "forward"] == (0.0, 0.0)
