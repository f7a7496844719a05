"""Some families of the zoo, and the zoo itself. All of it is `make zoo`."""

import json
import os
import signal
from functools import partial
from pathlib import Path

import pytest
import transformers
from transformers import PreTrainedConfig

from rotorch.cli import run
from rotorch.core.errors import ConfigError
from rotorch.source import source_commit
from rotorch.testing import subjects, zoo
from rotorch.testing.subjects import tiny_subject
from rotorch.testing.verify import verify_subject
from rotorch.testing.zoo import NO_PIPELINE_PLAN, Outcome, outcomes_of, run_zoo, table

pytestmark = [pytest.mark.usefixtures("warm"), pytest.mark.filterwarnings("default")]

ON_SLICES = "rtp=2[recompute=slice]"
ROOT = Path(__file__).resolve().parents[2]
RECORD, PAGE = ROOT / "benchmarks" / "results" / "zoo.jsonl", ROOT / "docs" / "models.md"

FAMILIES = {
    "CohereConfig": [ON_SLICES],  # norms over all heads, logits that are scaled
    "Olmo2Config": [ON_SLICES],  # attention whose columns are gathered
    "Phi3Config": [ON_SLICES],  # gate and up in one matrix
    "GptOssConfig": [ON_SLICES],  # sinks, biases of experts, windows
    "DeepseekV2Config": ["rtp=3[transport=send_receive]"],  # latent attention: 2 + 1 + 1 heads; shared experts
    "Qwen3NextConfig": [ON_SLICES],  # linear attention
    "GraniteMoeHybridConfig": [ON_SLICES],  # state spaces
    "EuroBertConfig": ["rtp=2"],  # a loss that does not shift
    "Qwen2VLTextConfig": [ON_SLICES, "tsp=2"],  # no head, so no loss of its own
    "Llama4TextConfig": ["rtp=2"],  # chunks
    "BeamConfig": ["rtp=2"],  # sinks of heads beside projections
    "Ernie4_5_MoeConfig": ["rtp=2"],  # a head that is tied but for its bias
    "Gemma4VisionConfig": ["rtp=2"],  # images, and no embedding of tokens
    "EmbeddingGemma2TextConfig": ["rtp=2"],  # layers of different sizes
    "Gemma4UnifiedTextConfig": ["pp=2"],  # heads of each layer its own
}
REPEATED = {
    "LlamaConfig": ["fsdp=2"],
    "GptOssConfig": ["tsp=2"],  # tests/strategies/test_context.py, on three ranks
    "Qwen3MoeConfig": ["rtp=2"],
    "Gemma3TextConfig": ["rtp=2"],  # windows, tied weights
}
"""Others are of these kinds, here or in tests/conformance."""


def config_class(name):
    return getattr(transformers, name)


@pytest.fixture
def one_micro_batch(monkeypatch):
    """Half the time of two. That gradients of several add up is held by tests/conformance, and by `make zoo`."""
    monkeypatch.setattr(subjects, "TinySubject", partial(subjects.TinySubject, num_micro_batches=1))


@pytest.mark.usefixtures("one_micro_batch")
@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        *(pytest.param(*family, id=family[0]) for family in FAMILIES.items()),
        *(pytest.param(*family, id=f"{family[0]}, too", marks=pytest.mark.slow) for family in REPEATED.items()),
    ],
)
def test_family_is_exact(name, layouts):
    for outcome in outcomes_of(config_class(name), layouts):
        assert outcome.ok, outcome
        assert outcome.max_rel_err_grad <= 1e-10
        # Where sums are cut their order differs, and zero would say that nothing was compared; stages cut none.
        assert outcome.max_rel_err_grad > 0 or outcome.parallel.startswith("pp")


# tests/models/test_model_checks.py has a small one under rtp.
@pytest.mark.parametrize("parallel", [pytest.param("rtp=4", marks=pytest.mark.slow), "fsdp=2"])
def test_a_routers_loss_counts_once(parallel):
    subject = tiny_subject(transformers.MixtralConfig)
    assert subject.config.output_router_logits
    subject.config.router_aux_loss_coef = 0.5
    report = verify_subject(subject, name="mixtral", parallel=parallel, steps=1)
    assert report.ok, report


@pytest.fixture
def few(monkeypatch):
    """A zoo of three configurations."""
    classes = [config_class(name) for name in ("LlamaConfig", "Qwen3Config", "T5GemmaModuleConfig")]
    monkeypatch.setattr(zoo, "configurations", lambda: iter(classes))


def told(**given):
    return Outcome(**{"config": "AConfig", "parallel": "rtp=2", "ok": True, "model": "A", **given})


def test_a_run_that_was_broken_off_goes_on(few, tmp_path, monkeypatch):
    cache, lines, asked = tmp_path / "zoo.jsonl", [], []

    def child(config_class, layouts):
        asked.append((config_class.__name__, *layouts))
        return [told(config=config_class.__name__, parallel=p) for p in layouts]

    monkeypatch.setattr(zoo, "_verify_in_child", child)
    run_zoo(["LlamaConfig"], layouts=["rtp=2"], cache=cache)
    cache.write_text(cache.read_text() + '{"config": "Qwen3Con')  # killed while it wrote
    cache.write_text(cache.read_text() + "\n")
    assert len(run_zoo(layouts=["rtp=2", "fsdp=2"], cache=cache, tell=lines.append)) == 6
    assert asked[1] == ("LlamaConfig", "fsdp=2")
    assert len(lines) == 3 and lines[0].startswith("[  1/3] LlamaConfig: rtp=2 exact, fsdp=2 exact")
    del asked[:]
    run_zoo(layouts=["rtp=2", "fsdp=2"], cache=cache)
    assert not asked
    monkeypatch.setattr(zoo, "_versions", lambda: "another state of the source")
    run_zoo(layouts=["rtp=2"], cache=cache, older=True)
    assert not asked
    run_zoo(layouts=["rtp=2"], cache=cache)
    assert len(asked) == 3


def test_a_model_that_kills_its_process_costs_its_own_row(few, tmp_path, monkeypatch):
    monkeypatch.setattr(zoo, "outcomes_of", lambda *a: os.kill(os.getpid(), signal.SIGKILL))
    (outcome,) = run_zoo(["LlamaConfig"], layouts=["rtp=2"], cache=tmp_path / "zoo.jsonl")
    assert not outcome.ok and "its process died" in outcome.why


def test_a_model_that_hangs_costs_its_own_row(few, tmp_path, monkeypatch):
    monkeypatch.setattr(zoo, "_SECONDS", 0.5)
    monkeypatch.setattr(zoo, "outcomes_of", lambda *a: iter(lambda: __import__("time").sleep(60), 1))
    (outcome,) = run_zoo(["LlamaConfig"], layouts=["rtp=2"], cache=tmp_path / "zoo.jsonl")
    assert not outcome.ok and "not done after" in outcome.why


class NowhereConfig(PreTrainedConfig):
    model_type = "nowhere"


def test_what_transformers_does_not_have_is_theirs():
    (outcome,) = outcomes_of(NowhereConfig, ["rtp=2"])
    assert not outcome.ok and outcome.why.startswith("theirs: ")
    with pytest.raises(ConfigError, match="no tiny NowhereConfig"):
        tiny_subject(NowhereConfig)


def test_a_part_of_a_configuration_has_the_models_that_take_it():
    from transformers.models.t5gemma.configuration_t5gemma import T5GemmaModuleConfig

    assert tiny_subject(T5GemmaModuleConfig).model_class.__name__ == "T5GemmaEncoder"


def test_the_table_counts_and_gives_reasons():
    page = table(
        [told(), told(parallel="fsdp=2", ok=False, why="ours: a | b"), told(config="BConfig")],
        layouts=["rtp=2", "fsdp=2"],
    )
    assert "| `rtp=2` | 2 | 0 | 2 |" in page and "| `fsdp=2` | 0 | 0 | 2 |" in page
    assert "| AConfig | A | exact | no |" in page and "| BConfig | A | exact | not run |" in page
    assert "**`fsdp=2` was not run for 1 of 2 configurations" in page and "`rtp=2` was not run" not in page
    assert "- **AConfig** (`fsdp=2`): ours: a \\| b" in page


def test_the_table_tells_refusals_from_failures_and_names_each_reason_once():
    refused = [
        told(config=f"{name}Config", model=name, parallel="tsp=2", ok=False, refused=True, why=f"rtp: {name} {said}")
        for name, said in (("A", "holds a state"), ("B", "looks at | others"), ("C", "looks at | others"))
    ]
    page = table(
        [*refused, told(config="DConfig", parallel="tsp=2", ok=False, why="ours: off by 1")], layouts=["tsp=2"]
    )
    assert "| `tsp=2` | 0 | 3 | 4 |" in page
    assert "| BConfig | B | refused |" in page and "| DConfig | A | no |" in page
    refusals, failures = page.partition("## Refused")[2].split("## Why not")
    assert "### `tsp=2`" in refusals and refusals.index("**2**") < refusals.index("**1**")
    assert "- **2**: rtp: the model looks at \\| others. BConfig, CConfig." in refusals
    assert "DConfig" not in refusals and "- **DConfig**: ours: off by 1" in failures
    assert "Config**" not in table([told()], layouts=["rtp=2"])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Llama4TextConfig", "its tokens look at others by more than attention. Leave context out"),
        ("EuroBertConfig", "computed so: EuroBertAttention attends in both directions. Leave context out"),
    ],
)
def test_a_model_whose_tokens_look_at_others_is_refused_before_anything_runs(name, said):
    (outcome,) = outcomes_of(config_class(name), ["tsp=2"])
    assert outcome.refused and not outcome.is_wrong
    assert outcome.why.startswith("rtp: context=2 gives each rank a part") and outcome.why.endswith(said)


def test_the_page_is_what_its_record_says():
    """Of the page's line on transformers the version is that of the last run, here the one that is installed."""
    record = [json.loads(line) for line in RECORD.read_text("utf-8").splitlines()]
    last = {(fields["config"], fields["parallel"]): fields for fields in record}
    outcomes = [Outcome(**{k: v for k, v in fields.items() if k != "depends_on"}) for fields in last.values()]
    made, page = (
        [line for line in text.splitlines() if "declares a tensor-parallel plan" not in line]
        for text in (table(outcomes, older=True), PAGE.read_text("utf-8"))
    )
    assert made == page


def test_the_table_names_what_was_not_run_and_what_has_no_pipeline_plan():
    outcomes = [told(parallel="pp=2", ok=False, why=NO_PIPELINE_PLAN), told(config="BConfig", parallel="pp=2")]
    page = table(outcomes, layouts=["pp=2"], names=["AConfig", "BConfig", "CConfig"], older=True)
    assert "| `pp=2` | 1 | 0 | 3 |" in page
    assert "| AConfig | A | no plan |" in page and "| CConfig |  | not run | | | |" in page
    assert "`pp=2`: 1 configurations have no pipeline plan" in page and "Why not" not in page
    assert "`pp=2` was not run for 1 of 3" in page and "earlier states" in page


def test_the_table_names_the_commits_of_every_row():
    outcomes = [
        told(config="AConfig", commit="a" * 40),
        told(config="AConfig", parallel="pp=2", commit="b" * 40 + "+"),
        told(config="BConfig"),
    ]
    rows = table(outcomes, layouts=["rtp=2", "pp=2"]).splitlines()
    assert next(r for r in rows if r.startswith("| AConfig")).endswith("| aaaaaaaaaa, bbbbbbbbbb+ (`pp=2`) |")
    assert next(r for r in rows if r.startswith("| BConfig")).endswith("| - |")


def test_what_is_known_is_a_table_without_a_run(few, tmp_path, monkeypatch, capsys):
    cache, page = tmp_path / "zoo.jsonl", tmp_path / "models.md"
    monkeypatch.setattr(
        zoo, "_verify_in_child", lambda c, layouts: [told(config=c.__name__, parallel=p) for p in layouts]
    )
    words = ["zoo", "--parallel", "rtp=2", "--parallel", "pp=2", "--cache", str(cache)]
    assert run([*words, "LlamaConfig"]) == 0
    assert {json.loads(line)["commit"] for line in cache.read_text().splitlines()} == {source_commit()}
    monkeypatch.setattr(zoo, "_verify_in_child", None)
    assert run([*words, "--known", "--out", str(page)]) == 0
    assert "| LlamaConfig | A | exact | exact |" in page.read_text()
    assert "| Qwen3Config |  | not run | not run |" in page.read_text()
    assert run([*words, "--known", "--again"]) == 2 and "Leave one of the two out" not in capsys.readouterr().out


@pytest.mark.usefixtures("one_micro_batch")
@pytest.mark.parametrize("parallel", ["pp=2", "tsp=2"])
def test_a_model_of_experts_is_held_without_the_loss_of_its_routers_where_no_rank_has_all_of_it(parallel):
    assert tiny_subject(transformers.MixtralConfig).config.output_router_logits
    (outcome,) = outcomes_of(transformers.MixtralConfig, [parallel])
    assert outcome.ok and outcome.max_rel_err_grad <= 1e-10, outcome


def test_without_a_pipeline_plan_nothing_is_run_in_stages():
    (outcome,) = outcomes_of(transformers.NemotronConfig, ["pp=2"])
    assert outcome.why == NO_PIPELINE_PLAN and outcome.model


def test_bad_names_and_layouts_are_refused_before_anything_runs(few, tmp_path, capsys):
    cache = str(tmp_path / "zoo.jsonl")
    for words, said in (
        (["zoo", "LlamaConfg"], "did you mean 'LlamaConfig'"),
        (["zoo", "--parallel", "rpt=2"], "did you mean 'rtp'"),
        (["zoo", "LlamaConfig", "--out", str(tmp_path / "models.md")], "a table of all models"),
    ):
        assert run([*words, "--cache", cache]) == 2
        assert said in capsys.readouterr().err


def test_the_command_writes_table_and_numbers(few, tmp_path, monkeypatch, capsys):
    def child(config_class, layouts):
        wrong = config_class.__name__ == "Qwen3Config"
        return [told(config=config_class.__name__, parallel=p, ok=not wrong, max_rel_err_grad=1e-3) for p in layouts]

    monkeypatch.setattr(zoo, "_verify_in_child", child)
    files = {name: tmp_path / name for name in ("models.md", "out.json", "zoo.jsonl")}
    words = ["zoo", "--parallel", "rtp=2", "--cache", str(files["zoo.jsonl"]), "--out", str(files["models.md"])]
    assert run([*words, "--json", str(files["out.json"])]) == 1  # one gave wrong gradients
    assert "rtp=2: 2 of 3 exact" in capsys.readouterr().out
    assert len(json.loads(files["out.json"].read_text())["outcomes"]) == 3
    assert "| `rtp=2` | 2 | 0 | 3 |" in files["models.md"].read_text()
