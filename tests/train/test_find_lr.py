"""`rotorch lr-find`: the rate that it chooses, and a sweep under a layout that leaves nothing behind."""

import json
import math

import pytest
from commands import rotorch, write_run

from rotorch.core.errors import ConfigError, RankFailure
from rotorch.train.find_lr import Sweep, drawn, has_risen, judged


def losses_of(rates, *, steepest, turns):
    """A loss that falls along a slope that is steepest at a rate, and rises from another one on."""
    found = []
    for rate in rates:
        falls = 2.0 / (1.0 + math.exp(-3.0 * math.log10(rate / steepest)))
        found.append(6.0 - falls + max(0.0, 8.0 * math.log10(rate / turns)))
    return found


def test_the_rate_of_the_steepest_fall_is_suggested():
    rates = Sweep(1e-6, 1.0, 300).rates()
    assert rates[0] == 1e-6 and rates[-1] == pytest.approx(1.0) and rates == sorted(rates)
    losses = losses_of(rates, steepest=1e-3, turns=2e-2)
    end = next(n for n in range(len(losses)) if has_risen(losses[: n + 1]))
    found = judged("single", rates, losses[: end + 1])
    assert 7e-4 < found.suggested < 4e-3  # smoothing lags by some of the steps
    assert found.suggested < found.lowest_loss_at < found.diverged_at == rates[end + 1]
    assert drawn(found).count("<polyline") == 2 and f"{found.suggested:.2g}" in drawn(found)


def test_no_rate_is_suggested_where_the_loss_only_rises():
    rates = Sweep(1e-3, 1.0, 30).rates()
    found = judged("single", rates, [5.0 + 0.01 * n for n in range(30)])
    assert found.suggested is None and found.diverged_at is None
    assert "none" in list(found.lines())[-1] and "<svg" in drawn(found)


def test_a_sweep_that_is_not_finite_from_the_start_has_failed():
    with pytest.raises(RankFailure, match="finite in 3 steps only"):
        judged("single", Sweep(1e-3, 1.0, 30).rates(), [5.0, 6.0, 9.0])


@pytest.mark.parametrize("sweep", [(0.0, 1.0, 30), (1.0, 0.1, 30), (1e-3, 1e9, 30), (1e-3, 1.0, 9)])
def test_ranges_that_are_none_are_refused(sweep):
    with pytest.raises(ConfigError, match="lr-find"):
        Sweep(*sweep).check()


def test_a_sweep_under_a_layout_is_that_of_one_process_and_leaves_nothing(tmp_path, warm):
    run_toml, found = write_run(tmp_path), {}
    for layout, rows in {"single": 4, "rtp=2": 2}.items():
        file, plot = tmp_path / f"{layout}.json", tmp_path / f"{layout}.svg"
        sizes = [f"train.micro_batch={rows}", "train.global_batch=4", "train.steps=1", "optimizer.warmup_steps=0"]
        told = ["--steps", 25, "--lowest", 1e-4, "--json", file, "--plot", plot, "--parallel", layout]
        done = rotorch(tmp_path / "log", "lr-find", run_toml, *sizes, *told)
        assert done.code == 0, done.stderr
        found[layout] = json.loads(file.read_text())
        assert f"optimizer.lr={found[layout]['suggested']:.2g}" in done.stdout and "<svg" in plot.read_text()
    assert found["rtp=2"]["losses"][:12] == pytest.approx(found["single"]["losses"][:12], rel=1e-4)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {
        "run.toml",
        "text.txt",
        "cache",
        "log",
        *(f"{one}.{end}" for one in found for end in ("json", "svg")),
    }
