"""`rotorch calibrate`: from what ranks measured to a cluster file that `rotorch plan` reads."""

import pytest

from rotorch import cli
from rotorch.cli.calibrate import cluster_text
from rotorch.planner.cluster import load_cluster
from rotorch.planner.speeds import speeds_of

MEASURED = {
    "flops float32 large": [60e9, 100e9, 80e9],
    "flops float32 small": [40e9, 40e9, 40e9],
    "flops bfloat16 large": [200e9, 160e9, 160e9],
    "bandwidth": [20e9, 10e9, 10e9],
    "operator": [2e-6, 2e-6, 3e-6],
    "latency": [1e-4, 1e-4, 2e-4],
    "sum": [1.01e-2, 1.01e-2, 2e-2],
}


def test_figures_become_a_cluster_file_with_sources(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(cluster_text([MEASURED, MEASURED], num_ranks=2))
    cluster = load_cluster(str(file))
    assert (cluster.num_devices, cluster.device.type) == (2, "cpu")
    assert (cluster.device.flops["float32"].value, cluster.device.flops["float32"].efficiency) == (100e9, 0.8)
    assert cluster.device.bandwidth.reached == pytest.approx(10e9)
    assert cluster.device.bandwidth.efficiency_source == "rotorch calibrate, the median"
    speeds = speeds_of(cluster, dtype="float32")
    assert speeds.operator_s == 2e-6 and speeds.links[0].latency_s == 1e-4
    assert speeds.links[0].bytes_per_s == pytest.approx(4 * (1 << 22) / 1e-2)
    assert speeds.half_size == pytest.approx((80 / 40 - 1) * 64 / 3, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nproc", "1"], "--nproc 1: a link joins two ranks or more"),
        (["--nproc", "2", "--out", "README.md"], "--out README.md: exists. Write another name"),
        (["--nproc", "2", "--out", "nowhere/mine.toml"], "--out nowhere/mine.toml: no directory nowhere"),
    ],
)
def test_wrong_input_is_said_before_anything_is_measured(options, words, capsys):
    assert cli.run(["calibrate", *options]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1
