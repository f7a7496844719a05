"""`compile=True`: the same losses and gradients, by one graph for all slices and all layers."""

import importlib
import json
import subprocess
import sys

import pytest
import torch
from compiler_marks import MARKS
from torch._dynamo.utils import counters

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.core.strategy import OneAxis
from rotorch.models import compiled as compiled_code
from rotorch.models.compiled import check_compiler
from rotorch.models.hf import causal_lm, config_from_dict
from rotorch.strategies import DDP, STRATEGIES, Single, check_compiled, parse_parallel
from rotorch.testing.ranks import run_ranks
from rotorch.train.metrics import read_metrics

pytestmark = MARKS

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


class Newcomer(OneAxis):
    """A strategy with no option, which says nothing of compiling."""

    kind = "newcomer"

    def layout(self, unit, *, position=0):
        return Single().layout(unit, position=position)


@pytest.fixture(scope="module", autouse=True)
def loaded():
    """Loads here what every forked rank would load for itself."""
    importlib.import_module("torch._inductor.compile_fx")


def step(layout, compile, accumulation=1, autocast=None):
    counters.clear()
    with rotorch.on_meta():
        module = causal_lm(config_from_dict(LLAMA, source="test")).double()
    if autocast is not None:
        module.float()
    model = rotorch.parallelize(module, layout, device="cpu", compile=compile, autocast_dtype=autocast)
    model.materialize(seed=0)
    ids = torch.randint(64, (6, 12), generator=torch.Generator().manual_seed(1))
    share = ids.chunk(model.num_batch_ranks)[model.batch_rank]
    batch = [{"input_ids": rows, "labels": rows} for rows in share.chunk(accumulation)]
    losses = [float(model.forward_backward(batch, accumulate=True)) for _ in range(2)]  # gradients add up
    grads = {name: model.full_tensor(name, grad=True) for name in model.weights}
    model.close()
    return losses, grads, counters["stats"]["unique_graphs"], dict(counters["graph_break"])


@pytest.mark.parametrize(
    ("layout", "graphs"),
    [
        pytest.param("rtp=2", 2, marks=pytest.mark.slow),  # attention and MLP, each with whole weights
        pytest.param("rtp=2[recompute=slice]", 4, marks=pytest.mark.slow),  # each also without gradients
        ("rtp=2[transport=send_receive]", 2),  # slices visit
        pytest.param("rtp=2[transport=send_receive,visits=2]", 2, marks=pytest.mark.slow),  # attention's two at once
        pytest.param(
            "rtp=3[transport=send_receive]", 3, marks=pytest.mark.slow
        ),  # 4 heads over 3 ranks: slices of 2 and of 1; the MLP's are alike
        pytest.param("fsdp=2", 1, marks=pytest.mark.slow),
        pytest.param("pp=2[schedule=zb_h1]", 2, marks=pytest.mark.slow),
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
        assert num_graphs == graphs or (layout.startswith("pp") and num_graphs == 1)  # on the rank with one layer
        assert not breaks or not exact


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "accumulation", "autocast", "graphs"),
    [
        ("rtp=3[transport=send_receive,buffering=in_place,recompute=slice]", 1, None, 6),  # uneven: two of attention
        ("rtp=2[transport=send_receive,buffering=in_place]", 3, None, 2),
        pytest.param("rtp=2[recompute=slice]", 3, None, 4, marks=pytest.mark.slow),
        ("rtp=2", 1, torch.bfloat16, 2),
    ],
)
def test_compiled_slices_in_other_cells_of_the_matrix(layout, accumulation, autocast, graphs):
    """In float64 as without a graph to 1e-10; in bfloat16 within what each of both rounds: a graph keeps more bits."""
    size = int(layout.partition("=")[2][0])
    args = (accumulation, autocast)
    plain = run_ranks(step, layout, False, *args, num_ranks=size, timeout_s=120)[0]
    for losses, grads, num_graphs, _ in run_ranks(step, layout, True, *args, num_ranks=size, timeout_s=400):
        assert losses == pytest.approx(plain[0], rel=1e-12 if autocast is None else 2.0**-9)
        for name, grad in grads.items():
            if autocast is None:
                torch.testing.assert_close(grad, plain[1][name], rtol=1e-10, atol=1e-12)
            else:
                assert (grad - plain[1][name]).norm() < 0.05 * plain[1][name].norm(), name
        assert num_graphs <= graphs


@pytest.mark.slow
def test_a_run_and_a_bench_take_it(tmp_path):
    """By the command line's switch; a bench holds the row to the losses of one process that compiles nothing."""
    (tmp_path / "text.txt").write_text("Slices go round; weights stay at home, and so does this ring. " * 60)
    model = "\n".join(f"{key} = {json.dumps(value)}" for key, value in {**LLAMA, "vocab_size": 257}.items())
    (tmp_path / "run.toml").write_text(
        f'[model.config]\n{model}\n[parallel]\nlayout = "rtp=2"\n[data]\nsource = "{tmp_path / "text.txt"}"\n'
        f"sequence_length = 16\n[train]\nsteps = 3\nmicro_batch = 2\n"
        'precision = "float32"\n[optimizer]\nlr = 1e-2\nwarmup_steps = 0\n'
    )
    rotorch_command, run = [sys.executable, "-m", "rotorch"], str(tmp_path / "run.toml")
    losses = []
    for switch in ([], ["--compile"]):
        out = tmp_path / f"run{len(losses)}"
        args = [*rotorch_command, "train", run, f"train.out={out}", *switch]
        done = subprocess.run(args, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        losses.append([line["loss"] for line in read_metrics(out)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and len(losses[1]) == 3
    bench = ["bench", run, "--parallel", "rtp=2", "--compile", "--rounds", "1", "--steps", "1", "--no-process-memory"]
    done = subprocess.run(
        [*rotorch_command, *bench, "--json", str(tmp_path / "b.json")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "blocks compiled" in done.stdout
    (row,) = json.loads((tmp_path / "b.json").read_text())["rows"]
    assert row["loss_max_rel_err"] < 1e-4


def given_to_the_compiler(layout):
    """Number of functions that a rank gives to torch.compile, which compiles nothing meanwhile."""
    given = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **_: given.append(function) or function)
        compiled_code._of_class.cache_clear()
        with rotorch.on_meta():
            module = causal_lm(config_from_dict(LLAMA, source="test"))
        rotorch.parallelize(module, layout, device="cpu", compile=True).close()
    return len(given)


COMPILES = [kind for kind, strategy in STRATEGIES.items() if not strategy.not_compiled]


@pytest.mark.parametrize("kind", COMPILES)
def test_what_is_not_refused_is_compiled(kind):
    size_fields = STRATEGIES[kind].size_fields
    layout = f"{kind}={'x'.join('1' * len(size_fields))}" if size_fields else kind
    assert run_ranks(given_to_the_compiler, layout, num_ranks=1) > [0]


def test_strategies_that_compile_nothing_are_refused():
    assert {"single", "ddp", "fsdp", "rtp", "megatron", "pp", "zeropp"} <= set(COMPILES)
    with pytest.raises(ConfigError, match=r"compile: newcomer=2: it compiles nothing\. Leave compile out"):
        check_compiled([DDP(size=2), Newcomer(size=2)])
    with pytest.raises(ConfigError, match="compile: atp=1x2: sums lie in the middle of modules"):
        check_compiled(parse_parallel("atp=1x2"))
    check_compiled(parse_parallel("ddp=2,rtp=2"))


def test_modules_without_blocks_are_refused():
    with pytest.raises(ConfigError, match=r"compile: Linear has no nn\.ModuleList of blocks\. Leave compile out"):
        rotorch.parallelize(torch.nn.Linear(2, 2), "single", device="cpu", compile=True)


def test_without_a_compiler_nothing_starts(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match="no-such-compiler"):
        check_compiler("cpu")
    check_compiler("cuda")
