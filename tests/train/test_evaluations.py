"""Evaluation on several named texts, and the early stop that goes by one of them."""

import json
import math
from types import SimpleNamespace

import pytest
from commands import rotorch, write_news, write_run

from rotorch.core.errors import ConfigError
from rotorch.run_config import load_run_config
from rotorch.train import run as run_module
from rotorch.train.early_stop import EARLY_STOP, EarlyStop, check_not_ended
from rotorch.train.metrics import HeldOut, StepRecord, read_metrics

EVALS = """
[[train.eval]]
name = "rings"
source = "rings.txt"
[[train.eval]]
name = "news"
source = "news.jsonl"
text_field = "body"
"""


@pytest.fixture
def run_toml(tmp_path):
    path = write_run(tmp_path)
    (tmp_path / "rings.txt").write_text("This ring goes round; slices come home again. " * 20)
    write_news(tmp_path, num_records=30)
    path.write_text(path.read_text() + EVALS)
    return path


def test_sources_of_evaluation_are_relative_to_the_file_and_to_the_directory_of_the_call(run_toml, tmp_path):
    config = load_run_config(run_toml)
    assert [(text.name, text.source) for text in config.train.eval] == [
        ("rings", str(tmp_path / "rings.txt")),
        ("news", str(tmp_path / "news.jsonl")),
    ]
    given = load_run_config(run_toml, overrides=['train.eval=[{name="a", source="stdlib"}, {name="b", source="/x"}]'])
    assert [text.source for text in given.train.eval] == ["stdlib", "/x"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (['train.eval=[{name="a", source="x"}, {name="a", source="y"}]'], "the name 'a' is taken"),
        (['train.eval=[{name="held-out", source="x"}]'], "the name 'held-out' is taken"),
        (['train.eval=[{name="a b", source="x"}]'], "train.eval.0.name"),
        (['train.eval=[{name="a", sourse="x"}]'], "did you mean 'train.eval.source'"),
        (["train.patience=2"], "train.eval_every=... too"),
        (["train.patience_on=perplexity"], "train.patience_on = 'perplexity': there is no text of that name"),
        (["train.patience=2", "train.eval_every=1", "train.patience_on=ring"], "did you mean 'rings'"),
        (["train.patience=2", "train.eval_every=1", "data.held_out_fraction=0"], "data.held_out_fraction = 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(run_toml, overrides, said):
    with pytest.raises(ConfigError) as refused:
        load_run_config(run_toml, overrides=overrides)
    assert said in str(refused.value)


def test_named_texts_are_measured_alike_under_every_layout(run_toml, tmp_path, warm):
    found = {}
    for layout, rows in {"single": 4, "rtp=2": 2}.items():
        out = tmp_path / layout
        sizes = ["train.steps=4", "train.eval_every=2", f"train.micro_batch={rows}", "train.global_batch=4"]
        told = ["--parallel", layout, f"train.out={out}", "--json", tmp_path / "end.json"]
        done = rotorch(tmp_path / "log", "train", run_toml, *sizes, *told)
        assert done.code == 0, done.stderr
        assert "rings" in done.stdout and "news" in done.stdout
        found[layout] = read_metrics(out)
        end = json.loads((tmp_path / "end.json").read_text())["evals"]
        assert end["news"]["loss"] == found[layout][-1]["eval_news_loss"]
    keys = [f"eval_{name}_{what}" for name in ("rings", "news") for what in ("loss", "bits_per_byte")]
    for one, other in zip(found["single"], found["rtp=2"], strict=True):
        assert all((key in one) is (one["step"] % 2 == 0) for key in keys)
        expected = [other[key] for key in keys if key in other]
        assert [one[key] for key in keys if key in one] == pytest.approx(expected, rel=1e-5)
    assert found["single"][-1]["eval_rings_loss"] != found["single"][-1]["eval_news_loss"]


def test_a_text_that_is_missing_is_named(run_toml, tmp_path, warm):
    (tmp_path / "news.jsonl").unlink()
    done = rotorch(tmp_path / "log", "train", run_toml)
    assert done.code == 2 and "train.eval 'news'" in done.stderr and not (tmp_path / "run").exists()


def test_patience_ends_a_run_and_going_on_is_refused_until_it_is_raised(run_toml, tmp_path, warm):
    told = ["train", run_toml, "train.eval_every=1", "train.patience=2", "train.patience_on=news"]
    told += ["train.min_improvement=50"]  # nothing counts after the first
    done = rotorch(tmp_path / "log", *told)
    assert done.code == 0, done.stderr
    assert len(read_metrics(tmp_path / "run")) == 3 and "ended       after step 3 of 6" in done.stdout
    again = rotorch(tmp_path / "log", *told, "--resume")
    assert again.code == 2 and "train.patience=0" in again.stderr
    on = rotorch(tmp_path / "log", *told, "train.patience=4", "--resume")
    assert on.code == 0 and len(read_metrics(tmp_path / "run")) == 5  # two evaluations were waited before, two now


@pytest.mark.parametrize("ends_early", [True, False])
def test_what_fails_behind_the_last_step_is_done_again_and_nothing_else(
    ends_early, run_toml, tmp_path, monkeypatch, warm
):
    """The first attempt fails as it writes the sample: the second one trains no step."""

    def fails_once(*arguments, **options):
        if not (tmp_path / "failed").exists():
            (tmp_path / "failed").touch()
            raise RuntimeError("the sample fails")
        return "a sample"

    monkeypatch.setattr(run_module, "write_sample", fails_once)
    told = ["train.eval_every=1", "train.checkpoint_every=2", "train.max_restarts=1", "sample.length=3"]
    if ends_early:
        told += ["train.patience=2", "train.patience_on=news", "train.min_improvement=50"]
    done = rotorch(tmp_path / "log", "train", run_toml, *told, "--json", tmp_path / "end.json")
    assert done.code == 0, done.stderr
    last = 3 if ends_early else 6
    assert "writing the sample: RuntimeError: the sample fails" in done.stderr
    assert f"Going on from step {last} with single (restart 1 of 1)" in done.stderr
    found, end = read_metrics(tmp_path / "run"), json.loads((tmp_path / "end.json").read_text())
    assert [line["step"] for line in found] == list(range(1, last + 1)) and end["step"] == last
    assert end["sample"] == "a sample" and ("in 2 evaluations since" in end["ended_early"]) is ends_early
    assert end["evals"]["news"]["loss"] == pytest.approx(found[-1]["eval_news_loss"], rel=1e-6)
    assert end["held_out_loss"] == pytest.approx(found[-1]["held_out_loss"], rel=1e-6)
    assert end["checkpoint"].endswith(f"step-{last:08d}")


def measured(loss):
    return {"held_out": HeldOut(1.0, loss, 8), "evals": {"news": HeldOut(1.0, -loss, 8)}}


def test_evaluations_are_counted_from_the_lowest_loss_also_through_a_checkpoint():
    train = SimpleNamespace(patience=3, patience_on="held-out", min_improvement=0.1)
    state = SimpleNamespace(data={"corpus": "here"})
    patience = EarlyStop(train, state=state)
    patience.remember_in(state)
    assert state.data == {"corpus": "here"}
    assert [patience.measured(step, **measured(loss)) for step, loss in enumerate([5, 4, 3.95], start=1)] == [""] * 3
    patience.remember_in(state)
    state.data = json.loads(json.dumps(state.data))  # as a checkpoint has it
    again = EarlyStop(train, state=state)
    assert again.measured(4, **measured(4.0)) == ""
    assert "4.0000 after step 2, and not lower in 3 evaluations" in again.measured(5, **measured(math.nan))
    again.remember_in(state)
    with pytest.raises(ConfigError, match=r"3 evaluations without a lower loss than that of step 2"):
        check_not_ended(state.data, train=train, checkpoint="there")
    train.patience_on = "news"
    check_not_ended(state.data, train=train, checkpoint="there")  # another text is another judgement
    assert state.data[EARLY_STOP]["waited"] == 3


def test_evaluations_of_another_text_or_of_an_earlier_part_of_the_run_do_not_count():
    train = SimpleNamespace(patience=2, patience_on="held-out", min_improvement=0.0)
    state = SimpleNamespace(data={"corpus": "here"})
    patience = EarlyStop(train, state=state)
    assert [patience.measured(step, **measured(loss)) for step, loss in enumerate([1, 2], start=1)] == ["", ""]
    patience.remember_in(state)
    on_news = SimpleNamespace(patience=2, patience_on="news", min_improvement=0.0)
    news = EarlyStop(on_news, state=state)
    rising = [{"held_out": None, "evals": {"news": HeldOut(1.0, loss, 8)}} for loss in (6.0, 7.0)]
    # 6 is the first loss on this text: neither worse than 1 on the other one, nor the second to be so.
    assert [news.measured(step, **found) for step, found in enumerate(rising, start=3)] == ["", ""]
    EarlyStop(SimpleNamespace(patience=0, patience_on="held-out", min_improvement=0.0), state=state).remember_in(state)
    assert state.data == {"corpus": "here"}  # a part of the run that judges nothing leaves nothing to go on with


def test_records_have_flat_names_and_null_for_what_is_not_finite():
    record = StepRecord(1, 2.0, 3, 4.0, 5.0, 6.0, 7, 8.0, evals={"news": HeldOut(math.inf, 1.5, 4)})
    found = record.to_json()
    assert found["eval_news_loss"] == 1.5 and found["eval_news_bits_per_byte"] is None and "evals" not in found
