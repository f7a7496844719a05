"""`rotorch train` where ranks share sequences: the same run as any other, its checkpoints go anywhere."""

import pytest
from commands import rotorch, write_run
from resharding import matrix

from rotorch.train.metrics import read_metrics


@pytest.fixture
def run_toml(tmp_path, warm):
    return write_run(tmp_path)


def recorded(directory):
    lines = read_metrics(directory)
    return [line["loss"] for line in lines], [line["tokens"] for line in lines]


@pytest.mark.parametrize(
    "layouts",
    [
        ("tsp=2",),
        # tests/conformance and tests/strategies/test_context.py have their numerics; the loop knows of ranks alone.
        pytest.param(("tsp=2", "fsdp=2[context=2]", "pp=2,tsp=2[exchange=heads]"), marks=pytest.mark.slow),
    ],
)
def test_a_run_is_the_same_and_goes_on_under_another_layout(run_toml, tmp_path, layouts):
    """Samples of 15 tokens: ranks have 8 and 7. Also its evaluations; half-way another layout takes over."""
    common = [
        "model.config.num_hidden_layers=2",
        "data.sequence_length=15",
        "train.global_batch=2",
        "train.eval_every=3",
        "train.checkpoint_every=3",
    ]
    evaluated = {}
    for layout in ("single", *layouts):
        summary = tmp_path / f"{layout}.json"
        done = rotorch(tmp_path / "log", "train", run_toml, "--parallel", layout, *common,
                       f"train.out={tmp_path / layout}", "--json", summary)  # fmt: skip
        assert done.code == 0, done.stderr
        evaluated[layout] = [
            line["held_out_loss"] for line in read_metrics(tmp_path / layout) if "held_out_loss" in line
        ]
    losses, tokens = recorded(tmp_path / "single")
    assert losses[-1] < losses[0]
    for layout in list(evaluated)[1:]:
        found, counted = recorded(tmp_path / layout)
        assert found == pytest.approx(losses, rel=1e-5) and counted == tokens, layout
        assert evaluated[layout] == pytest.approx(evaluated["single"], rel=1e-5) and len(evaluated[layout]) >= 2
    for left in (tmp_path / "tsp=2" / "checkpoints").glob("step-*6"):
        left.rename(tmp_path / left.name)
    resumed = rotorch(tmp_path / "log", "train", run_toml, "--parallel", "single", *common,
                      f"train.out={tmp_path / 'tsp=2'}", "--resume")  # fmt: skip
    assert resumed.code == 0, resumed.stderr
    assert recorded(tmp_path / "tsp=2")[0] == pytest.approx(losses, rel=1e-5)


def test_documents_of_a_sample_stay_apart_under_every_layout(run_toml, tmp_path):
    (tmp_path / "text.txt").write_text("Slices go round.\n" * 300)
    arguments = ["data.documents=apart", "train.global_batch=2", "train.steps=2", "train.eval_every=0"]
    for layout in ("single", "tsp=2"):
        done = rotorch(tmp_path / "log", "train", run_toml, "--parallel", layout, *arguments,
                       f"train.out={tmp_path / layout}")  # fmt: skip
        assert done.code == 0, done.stderr
    assert recorded(tmp_path / "tsp=2")[0] == pytest.approx(recorded(tmp_path / "single")[0], rel=1e-5)


@pytest.mark.slow  # test_resharding.py has a checkpoint into and out of tsp=2 among its few
def test_checkpoints_go_into_other_layouts_and_come_from_them(tmp_path, warm):
    """To the bit: weights and moments under each of these layouts, written by each of them."""
    cells = matrix(["single", "tsp=2"], tmp_path)  # shards are at rest as without sharing
    assert len(cells) == 4
    assert not {pair: cell for pair, cell in cells.items() if not cell.is_exact}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.sequence_length=1", "2 ranks share each sample (context). Write data.sequence_length=2 or more"),
        ("train.compile=true", "train.compile would trace through the exchange of keys and values"),
        ('model.config.model_type=lfm2 model.config.layer_types=["conv"]', "cannot be computed so"),
    ],
)
def test_nothing_starts_that_cannot_be(run_toml, tmp_path, override, said):
    done = rotorch(tmp_path / "log", "train", run_toml, "--parallel", "tsp=2", *override.split())
    assert done.code == 2 and said in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 or "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
