"""Completion in the shell: keys of a run and their values, as bash and others ask for them."""

import pytest
from typer.testing import CliRunner

from rotorch.cli import app
from rotorch.cli.override_words import key_values, words
from rotorch.run_config import RunConfig


@pytest.mark.parametrize(
    ("incomplete", "expected"),
    [
        ("optimizer.n", ["optimizer.name=adamw"]),
        ("train.prec", ["train.precision=float32", "train.precision=bfloat16", "train.precision=autocast_bfloat16"]),
        ("train.precision=b", ["train.precision=bfloat16"]),
        ("train.compile=", ["train.compile=false", "train.compile=true", "train.compile=reduce-overhead"]),
        ("train.eval_", ["train.eval_every=", "train.eval_windows="]),
        ("train.st", ["train.steps="]),
        ("op", [f"optimizer.{name}=" for name in ("name", "arguments", "lr", "betas", "eps")]),
        ("nothing", []),
    ],
)
def test_words(incomplete, expected):
    found = words(incomplete, environment={})
    assert found[: len(expected)] == expected and bool(found) == bool(expected)


def test_the_beginning_of_every_section_is_offered():
    assert words("", environment={}) == [
        f"{name}." for name in dict.fromkeys(k.partition(".")[0] for k in key_values(RunConfig))
    ]


@pytest.mark.parametrize(
    ("line", "at", "expected"),
    [
        ("rotorch train run.toml train.precision = bf", 5, ["bfloat16"]),
        ("rotorch train run.toml train.precision =", 4, ["float32", "bfloat16", "autocast_bfloat16"]),
        ("rotorch train run.toml optimizer.sch", 3, ["optimizer.schedule=cosine", "optimizer.schedule=linear"]),
    ],
)
def test_bash_cuts_words_at_equals(line, at, expected):
    asked = {"_ROTORCH_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(at)}
    found = CliRunner().invoke(app, [], prog_name="rotorch", env=asked)
    assert found.output.split()[: len(expected)] == expected
