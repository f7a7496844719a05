"""The precision of a run: its names, what its passes compute with."""

import pytest
import torch

from rotorch.core.precision import PRECISIONS
from rotorch.run_config import RunConfig
from rotorch.strategies import parse_parallel
from rotorch.train.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    ModelEntry,
    json_digest,
    manifest_text,
    read_manifest,
)
from rotorch.train.checks.preflight import check_device
from rotorch.train.module import precision_arguments
from rotorch.train.reference import reference_digest


def run_with(precision):
    return RunConfig(
        model={"config": "configs/tiny/llama.json"},
        train={"steps": 1, "precision": precision, "device": "cpu"},
    )


def test_a_precision_says_what_passes_compute_with():
    arguments = [precision_arguments(precision) for precision in PRECISIONS]
    assert arguments == [{}, {"param_dtype": torch.bfloat16}, {"autocast_dtype": torch.bfloat16}]


def test_the_name_of_the_release_before_is_taken():
    assert run_with("param_bfloat16").train.precision == "bfloat16"


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "layout",
    [
        "single",
        "ddp=2",
        "fsdp=2",
        "rtp=1",
        "rtp=2",
        "pp=2",
        "fsdp=2,megatron=2",
        "rtp=2,megatron=2",
        "zeropp=2x1",
        "summa=2x2",
    ],
)
def test_every_layout_takes_every_precision(layout, precision):
    check_device(run_with(precision), strategies=parse_parallel(layout))


@pytest.mark.parametrize(
    ("version", "written", "meant"),
    [(1, "bfloat16", "autocast_bfloat16"), (1, "param_bfloat16", "bfloat16"), (2, "bfloat16", "bfloat16")],
)
def test_checkpoints_of_version_1_had_autocast_as_bfloat16(tmp_path, version, written, meant):
    manifest = Manifest(
        **{"version": version, "step": 1, "tokens": 1, "seed": 0, "parallel": "single", "num_ranks": 1, "versions": {}},
        **{"model": ModelEntry(name="model", config=None, config_sha256=None), "optimizer": None, "schedule": {}},
        **{"data": {}, "run": {"train": {"precision": written}}},
    )
    raw = manifest.model_dump(mode="json")
    (tmp_path / MANIFEST).write_text(manifest_text({**raw, "digest": json_digest(raw)}))
    found = read_manifest(tmp_path)
    assert (found.version, found.run["train"]["precision"]) == (2, meant)
    assert found.precision == meant


def test_digests_of_references_are_those_of_the_release_before():
    """There "bfloat16" was autocast: log-probabilities that were computed so are not taken for others."""
    before = {"float32": "float32", "autocast_bfloat16": "bfloat16", "bfloat16": "param_bfloat16"}
    for today, then in before.items():
        assert reference_digest(run_with(today)) == json_digest([then, [0]])
