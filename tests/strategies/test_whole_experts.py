"""Experts that rotate whole: exact on models with experts of all kinds, each token computed once, to the byte."""

from dataclasses import replace

import pytest
import torch
from mixtures import described, tiny_config
from small_configs import SIZES

import rotorch
from rotorch._torch_private import TorchDispatchMode
from rotorch.core.errors import ConfigError
from rotorch.core.spec import Combine, Cut, LayerOrder, ModelSpec, Unit, UnitKind, Weight
from rotorch.core.whole_experts import WholeExperts, with_whole_experts
from rotorch.models.describe import describe
from rotorch.models.hf import causal_lm, load_config
from rotorch.shard.materialize import on_meta
from rotorch.strategies import parse_parallel
from rotorch.testing.batches import global_batch
from rotorch.testing.ranks import run_ranks
from rotorch.testing.subjects import CausalLM
from rotorch.testing.verify import BAR, verify_subject

pytestmark = pytest.mark.usefixtures("warm")

MODELS = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")


# ---- units and bytes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
def test_every_module_of_experts_is_a_unit_cut_between_them(kind):
    spec = described(tiny_config(kind))
    whole = with_whole_experts(spec)
    units = [unit for unit in whole.units if unit.note(WholeExperts)]
    assert len(units) == (1 if kind in ("qwen3_moe", "deepseek_v3") else 2)
    for unit in units:
        assert unit.kind is UnitKind.MODULE
        assert {w.cut.dim for w in unit.weights} == {0}
        assert len(unit.weights) == (4 if kind == "gpt_oss" else 2)  # biases belong to their experts
    assert sorted(w.name for w in whole.weights) == sorted(w.name for w in spec.weights)
    assert whole.num_bytes == spec.num_bytes
    assert with_whole_experts(whole) == whole


@pytest.mark.parametrize("layer", [0, 1])
def test_experts_that_were_replicated_come_before_later_layers(layer):
    """Also in the first layer of a model without an embedding, where no unit before them is cut."""

    def unit(name, *, kind=UnitKind.MODULE, combine=Combine.SUM, notes=()):
        return Unit(name, kind, combine, (Weight(f"{name}.weight", (6, 4, 4), 4, Cut(0, 6)),), notes=notes)

    experts = unit(f"layers.{layer}.experts", notes=(WholeExperts(6),))
    cut = [unit(f"layers.{number}.mlp") for number in range(3) if number != layer]
    whole = replace(experts, kind=UnitKind.REPLICATED, combine=Combine.NONE, notes=())
    order = LayerOrder(layers=("layers.0", "layers.1", "layers.2"), width=4)
    spec = ModelSpec("spec", (*cut, whole), order=order, experts=(experts,))
    assert with_whole_experts(spec).units == (*cut[:layer], experts, *cut[layer:])


def test_a_slice_is_a_set_of_experts():
    """Five experts over three ranks: 2 + 2 + 1; together as many bytes as one process has."""
    spec = with_whole_experts(described(tiny_config("mixtral")))
    unit = next(unit for unit in spec.units if unit.note(WholeExperts))
    (strategy,) = parse_parallel("rtp=3[transport=send_receive,experts=whole]")
    resident = [strategy.layout(unit, position=rank).resident_bytes for rank in range(3)]
    assert [5 * num_bytes // unit.num_bytes for num_bytes in resident] == [2, 2, 1]
    assert sum(resident) == unit.num_bytes


def test_bytes_of_even_sets_are_those_of_cut_experts():
    spec = described(tiny_config("mixtral", num_local_experts=4))
    layouts = []
    for experts in ("cut", "whole"):
        (strategy,) = parse_parallel(f"rtp=2[transport=send_receive,experts={experts}]")
        layouts.append(strategy.layout_of(strategy.units_of(spec)))
    assert layouts[0].resident_bytes == layouts[1].resident_bytes
    assert layouts[0].sent_bytes() == layouts[1].sent_bytes()


# ---- numerics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("qwen3_moe", "rtp=2[recompute=slice,experts=whole]"),
        ("gpt_oss", "rtp=3[experts=whole]"),
        ("deepseek_v3", "rtp=4[transport=send_receive,buffering=in_place,experts=whole]"),
        ("mixtral", "rtp=6[transport=send_receive,experts=whole]"),  # one rank has no expert; a loss of routers
        ("qwen3_moe", "rtp=2[context=2,experts=whole]"),
        pytest.param("mixtral", "rtp=3[transport=send_receive,experts=whole]", marks=pytest.mark.slow),
        pytest.param("gpt_oss", "ddp=2,rtp=2[experts=whole]", marks=pytest.mark.slow),
        pytest.param("gpt_oss", "rtp=2[recompute=slice,transport=send_receive,experts=whole]", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "rtp=4[transport=send_receive,visits=2,experts=whole]", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "pp=2,rtp=2[experts=whole]", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "rtp=2[recompute=all_but_attention,experts=whole]", marks=pytest.mark.slow),
    ],
)
def test_exact(kind, layout):
    report = verify_subject(CausalLM(tiny_config(kind)), name=kind, parallel=layout, steps=2, timeout_s=300)
    assert report.ok, (report.verdict, report.worst_weights)
    assert max(report.max_rel_err_loss, report.max_rel_err_grad) <= BAR


def test_sets_that_no_token_goes_to():
    """Four tokens with one expert each, of sixteen over four ranks."""
    config = tiny_config("mixtral", num_local_experts=16, num_experts_per_tok=1, max_position_embeddings=2)
    report = verify_subject(
        CausalLM(config), name="few", parallel="rtp=4[transport=send_receive,experts=whole]", steps=2, timeout_s=300
    )
    assert report.ok, (report.verdict, report.worst_weights)


# ---- products --------------------------------------------------------------------------------------------------------

WIDTHS = {40, 80}  # of the experts, and of nothing else


class Products(TorchDispatchMode):
    """Counts multiplications of all products of matrices, and products with a matrix of an expert's whole width."""

    def __init__(self):
        super().__init__()
        self.of_experts = self.multiplications = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("mm", "addmm", "addmm_", "bmm", "baddbmm"):
            a, b = [x for x in args if isinstance(x, torch.Tensor)][-2:]
            self.multiplications += a.numel() * b.shape[-1]
            self.of_experts += not WIDTHS.isdisjoint({*a.shape, *b.shape})
        return func(*args, **(kwargs or {}))


def products(step):
    with Products() as counted:
        step()
    return counted.of_experts, counted.multiplications


def of_rank(config, layout, rows):
    model = rotorch.parallelize(causal_lm(config), layout, device="cpu")
    return products(lambda: model.forward_backward([rows]))


def test_products_of_a_rank_are_those_of_one_process():
    """Each pair of a token and an expert is multiplied once, by whole matrices; cut experts take twice as many."""
    config = tiny_config("mixtral", output_router_logits=False)
    rows = global_batch(
        seed=0, step=0, num_shares=1, num_micro_batches=1, num_rows=2, num_tokens=32, vocab_size=SIZES["vocab_size"]
    )
    torch.manual_seed(0)
    dense = causal_lm(config).train()
    expected = products(lambda: dense(**rows).loss.backward())
    assert expected[0] == 2 * 5 * 6  # layers, experts, two products forward and four backward
    torch.manual_seed(0)
    layout = "rtp=2[recompute=none,transport=send_receive,experts=whole]"
    assert run_ranks(of_rank, config, layout, rows, num_ranks=2) == [expected, expected]


# ---- refused ---------------------------------------------------------------------------------------------------------


def test_models_without_experts_are_refused(tiny):
    with on_meta():
        llama = describe(causal_lm(load_config(tiny("llama"))))
    (strategy,) = parse_parallel("rtp=2[experts=whole]")
    with pytest.raises(ConfigError, match=r"none that could .* it has no module of experts\. Leave"):
        strategy.check(llama)


def test_experts_that_take_all_tokens_are_refused():
    """Llama 4 gives each expert all tokens, scaled, so that none goes to some of them."""
    config = tiny_config("llama4_text", num_local_experts=4, intermediate_size_mlp=40)
    (strategy,) = parse_parallel("rtp=2[experts=whole]")
    with pytest.raises(ConfigError, match="Llama4TextExperts was not seen to compute tokens by the experts"):
        strategy.check(described(config))


def of_compiled(config):
    with pytest.raises(ConfigError, match=r"would be compiled for each\. Leave experts out"):
        rotorch.parallelize(causal_lm(config), "rtp=2[experts=whole]", device="cpu", compile=True)


def test_compiled_forwards_are_refused():
    run_ranks(of_compiled, tiny_config("mixtral"), num_ranks=2)
