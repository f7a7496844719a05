"""The option that changes the model, under every invariant of rotorch's conformance tests."""

from pathlib import Path

from rotorch.testing.conformance import Bars, examine, make_case

MODEL = Path(__file__).parents[2] / "configs" / "tiny" / "qwen3.json"  # or a configuration of your own
ROUNDED = Bars(loss=1e-3, gradient=2.0**-7)
"""Largest errors: gradients are rounded to 8 digits (binary) before the sum, and the sum once more."""


def test_rounded_sums_keep_all_else(tmp_path):
    """Bytes held and sent, weights at rest after a step and after an exception, checkpoints: as of an exact layout."""
    case = make_case(MODEL, directory=tmp_path / "checkpoint")
    problems = examine(case, parallel="ddp_bf16=2[bfloat16=true]", scratch=tmp_path / "scratch", bars=ROUNDED)
    assert not any(problems.values()), problems
