"""`compile=True`: the same losses and gradients, by one graph for all slices and all layers."""

import importlib

import pytest
import torch
from torch._dynamo.utils import counters

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.models.compiled import check_compiler
from rotorch.models.hf import causal_lm, config_from_dict
from rotorch.testing.ranks import run_ranks

pytestmark = [  # torch's own, when it compiles
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module", autouse=True)
def loaded():
    """Loads here what every forked rank would load for itself."""
    importlib.import_module("torch._inductor.compile_fx")


def step(layout, compile):
    counters.clear()
    with rotorch.on_meta():
        module = causal_lm(config_from_dict(LLAMA, source="test")).double()
    model = rotorch.parallelize(module, layout, device="cpu", compile=compile).materialize(seed=0)
    ids = torch.randint(64, (6, 12), generator=torch.Generator().manual_seed(1))
    share = ids.chunk(model.num_batch_ranks)[model.batch_rank]
    losses = [
        float(model.forward_backward({"input_ids": share, "labels": share})) for _ in range(2)
    ]  # gradients add up
    grads = {name: model.full_tensor(name, grad=True) for name in model.weights}
    model.close()
    return losses, grads, counters["stats"]["unique_graphs"], dict(counters["graph_break"])


@pytest.mark.parametrize(
    ("layout", "graphs"),
    [
        ("rtp=2", 2),  # attention and MLP
        ("rtp=2[recompute=slice]", 4),  # each also without gradients
        ("rtp=3[transport=send_receive]", 3),  # 4 heads over 3 ranks: slices of 2 and of 1; the MLP's are alike
        ("fsdp=2", 1),
        pytest.param("pp=2[schedule=zb_h1]", 2, marks=pytest.mark.slow),  # which puts weight gradients off
    ],
)
def test_compiled_blocks_give_the_same_by_few_graphs(layout, graphs):
    exact = layout.startswith("rtp")  # fsdp's blocks have norms inside, which Llama computes in float32
    rtol, atol = (1e-10, 1e-12) if exact else (1e-4, 1e-7)
    size = int(layout.partition("=")[2][0])
    plain = run_ranks(step, layout, False, num_ranks=size, timeout_s=120)[0]
    assert plain[2] == 0
    for losses, grads, num_graphs, breaks in run_ranks(step, layout, True, num_ranks=size, timeout_s=300):
        assert losses == pytest.approx(plain[0], rel=1e-12 if exact else 1e-6)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, plain[1][name], rtol=rtol, atol=atol)
        assert num_graphs == graphs
        assert not breaks or not exact


def test_without_a_compiler_nothing_starts(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match="no-such-compiler"):
        check_compiler("cpu")
    check_compiler("cuda")
