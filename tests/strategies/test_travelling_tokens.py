"""Experts that stay on their ranks, to which tokens travel (`ep=n`): exact, to the byte, and who is refused."""

import pytest
import torch
from mixtures import described, tiny_config
from small_configs import SIZES

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.core.traffic import Kind, MicroBatch
from rotorch.core.whole_experts import WholeExperts, crossover_tokens
from rotorch.models.describe import describe
from rotorch.models.hf import causal_lm, load_config
from rotorch.shard.materialize import on_meta
from rotorch.strategies import format_parallel, parse_parallel
from rotorch.testing.batches import global_batch
from rotorch.testing.ranks import run_ranks
from rotorch.testing.subjects import CausalLM
from rotorch.testing.traffic import sent_and_said
from rotorch.testing.verify import BAR, verify_subject

pytestmark = pytest.mark.usefixtures("warm")


def strategy_of(text):
    (strategy,) = parse_parallel(text)
    return strategy


# ---- spelling, bytes -------------------------------------------------------------------------------------------------


def test_ep_is_short_for_experts_that_stay_under_fsdp():
    assert format_parallel(parse_parallel("ep=4")) == "fsdp=4[experts=whole]"
    assert parse_parallel("ddp=2,ep=2[recompute=block]") == parse_parallel(
        "ddp=2,fsdp=2[recompute=block,experts=whole]"
    )
    with pytest.raises(ConfigError, match=r"ranks of ep have whole experts\. Write ep=4, or fsdp=4"):
        parse_parallel("ep=4[experts=cut]")


def test_a_rank_holds_a_set_of_experts_and_gathers_none():
    """Five experts over three ranks: 2 + 2 + 1."""
    strategy = strategy_of("ep=3")
    spec = strategy.units_of(described(tiny_config("mixtral")))
    experts = [unit for unit in spec.units if unit.note(WholeExperts)]
    assert len(experts) == 2
    for unit in experts:
        layouts = [strategy.layout(unit, position=rank) for rank in range(3)]
        assert [5 * layout.resident_bytes // unit.num_bytes for layout in layouts] == [2, 2, 1]
        assert not any(layout.transfers or layout.transient_bytes for layout in layouts)
    assert sum(strategy.layout_of(spec, position=rank).resident_bytes for rank in range(3)) == spec.num_bytes


def test_tokens_and_experts_send_as_much_at_the_crossover():
    """By the Layouts of both forms; weights of pairs and numbers of experts travel beside tokens: 3 %."""
    spec = described(tiny_config("mixtral", num_local_experts=4, hidden_size=256, intermediate_size=512))
    unit = next(unit for unit in strategy_of("ep=2").units_of(spec).units if unit.note(WholeExperts))
    tokens = round(crossover_tokens(unit, itemsize=4))
    assert tokens == 3 * 4 * 3 * 512 / (4 * 2)
    for n in (2, 4):
        rides = strategy_of(f"rtp={n}[transport=send_receive,experts=whole]").layout(unit).sent_bytes()
        batch = MicroBatch(num_rows=1, num_tokens=tokens)
        travels = sum(t.sent_bytes for t in strategy_of(f"ep={n}").activation_transfers(unit, batch=batch))
        assert rides == 3 * (n - 1) * unit.num_bytes // n
        assert travels == pytest.approx(rides, rel=0.03)


@pytest.mark.parametrize(
    ("number", "width", "per_token", "features"), [(8, 14_336, 2, 4096), (128, 768, 8, 2048)], ids=["8x7B", "30B-A3B"]
)
def test_the_page_has_the_crossovers_of_published_models(pytestconfig, number, width, per_token, features):
    sizes = {"num_local_experts": number, "num_experts_per_tok": per_token, "num_hidden_layers": 1}
    spec = described(tiny_config("mixtral", intermediate_size=width, hidden_size=features, **sizes))
    unit = next(unit for unit in strategy_of("ep=2").units_of(spec).units if unit.note(WholeExperts))
    page = (pytestconfig.rootpath / "docs" / "long_context.md").read_text("utf-8")
    assert f"{crossover_tokens(unit, itemsize=4):,.0f}" in page


def sent_in_a_step(config, layout, rows):
    rank = torch.distributed.get_rank()
    return sent_and_said(causal_lm(config), layout, batch={name: part[rank : rank + 1] for name, part in rows.items()})


@pytest.mark.parametrize("layout", ["ep=3", "ep=3[recompute=block]"])
def test_bytes_are_the_formula_of_the_pairs_that_travelled(layout):
    """Nothing else is sent between two ranks: tokens to experts, rows back, gradients of both."""
    config = tiny_config("mixtral", output_router_logits=False)
    rows = global_batch(
        seed=0, step=0, num_shares=1, num_micro_batches=1, num_rows=3, num_tokens=32, vocab_size=SIZES["vocab_size"]
    )
    for sent, said in run_ranks(sent_in_a_step, config, layout, rows, num_ranks=3):
        assert sent[Kind.SEND] == said[Kind.SEND] > 0


# ---- numerics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param("mixtral", "ep=2", marks=pytest.mark.slow),  # with the loss of its routers
        ("qwen2_moe", "ep=3"),
        ("gpt_oss", "ep=3[recompute=block]"),
        pytest.param("mixtral", "ep=3[reshard=false]", marks=pytest.mark.slow),
        pytest.param("qwen2_moe", "ep=2[recompute=block]", marks=pytest.mark.slow),
        pytest.param("gpt_oss", "ep=2", marks=pytest.mark.slow),
        pytest.param("gpt_oss", "ddp=2,ep=2", marks=pytest.mark.slow),
        pytest.param("qwen2_moe", "ep=2[context=2]", marks=pytest.mark.slow),
        pytest.param("qwen2_moe", "pp=2[schedule=zb_h1],ep=3[recompute=block]", marks=pytest.mark.slow),
    ],
)
def test_exact(kind, layout):
    report = verify_subject(CausalLM(tiny_config(kind)), name=kind, parallel=layout, steps=2, timeout_s=300)
    assert report.ok, (report.verdict, report.worst_weights)
    assert max(report.max_rel_err_loss, report.max_rel_err_grad) <= BAR


@pytest.mark.parametrize("layout", [pytest.param("ep=4", marks=pytest.mark.slow), "ep=4[recompute=block]"])
def test_ranks_that_no_token_goes_to(layout):
    """Four tokens with one expert each, of sixteen over four ranks."""
    config = tiny_config("mixtral", num_local_experts=16, num_experts_per_tok=1, max_position_embeddings=2)
    report = verify_subject(CausalLM(config), name="few", parallel=layout, steps=2, timeout_s=300)
    assert report.ok, (report.verdict, report.worst_weights)


def of_one_token(config):
    torch.manual_seed(0)
    module, ids = causal_lm(config).eval(), torch.tensor([[3]])
    with torch.no_grad():
        dense = module(input_ids=ids).logits[:, -1]
    found = rotorch.parallelize(module, "ep=2", device="cpu").next_token_logits(ids)
    torch.testing.assert_close(found, dense)


def test_a_single_row_arrives():
    """In float32 its bytes are no multiple of those of the expert's number beside it."""
    run_ranks(of_one_token, tiny_config("mixtral", num_experts_per_tok=1), num_ranks=2)


# ---- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "more", "said"),
    [
        ("ep=6", {}, r"over 6 ranks, and 'model\.layers\.0\.mlp\.experts' has 5 experts.* Write fsdp=5 or less"),
        (
            "pp=2,ep=6",
            {"output_router_logits": False},
            r"over 6 ranks, and 'model\.layers\.0\.mlp\.experts' has 5 experts.* Write fsdp=5 or less",
        ),
    ],
)
def test_refused_before_anything_starts(layout, more, said):
    spec = described(tiny_config("mixtral", **more))
    with pytest.raises(ConfigError, match=said):
        for strategy in parse_parallel(layout):
            strategy.check(spec)
            spec = strategy.units_of(spec)


def test_models_without_experts_are_refused(tiny):
    with on_meta():
        llama = describe(causal_lm(load_config(tiny("llama"))))
    with pytest.raises(ConfigError, match=r"^fsdp: .* it has no module of experts\. Leave"):
        strategy_of("ep=2").check(llama)


def test_experts_that_modules_share_are_refused():
    with on_meta():
        model = causal_lm(tiny_config("mixtral"))
    model.model.layers[1].mlp.experts = model.model.layers[0].mlp.experts
    with pytest.raises(ConfigError, match=r"modules share the weights of their experts\. Leave experts out"):
        strategy_of("ep=2").check(describe(model))


def of_compiled(config):
    with pytest.raises(ConfigError, match=r"^fsdp: .* would be compiled for each\. Leave experts out"):
        rotorch.parallelize(causal_lm(config), "ep=2", device="cpu", compile=True)


def test_compiled_forwards_are_refused():
    run_ranks(of_compiled, tiny_config("mixtral"), num_ranks=2)
