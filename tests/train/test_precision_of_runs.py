"""The precision of a run: what its passes compute with, and layouts that are refused before anything starts."""

import pytest
import torch

from rotorch.core.errors import ConfigError
from rotorch.run_config import RunConfig
from rotorch.strategies import parse_parallel
from rotorch.train.checks.preflight import check_device
from rotorch.train.module import precision_arguments


def run_with(precision):
    return RunConfig(
        model={"config": "configs/tiny/llama.json"},
        train={"steps": 1, "precision": precision, "device": "cpu"},
    )


def test_a_precision_says_what_passes_compute_with():
    assert precision_arguments("float32") == {}
    assert precision_arguments("bfloat16") == {"autocast_dtype": torch.bfloat16}
    assert precision_arguments("param_bfloat16") == {"param_dtype": torch.bfloat16}


@pytest.mark.parametrize("layout", ["summa=2x2", "tesseract=1x1x2", "ddp=2,summa=1x1", "rtp=1"])
def test_layouts_without_converted_weights_are_refused_by_name(layout):
    with pytest.raises(ConfigError, match=r"train.precision = 'param_bfloat16': .* Write train.precision=bfloat16, or"):
        check_device(run_with("param_bfloat16"), strategies=parse_parallel(layout))
    check_device(run_with("bfloat16"), strategies=parse_parallel(layout))


@pytest.mark.parametrize(
    "layout",
    ["single", "ddp=2", "fsdp=2", "rtp=2", "ddp=2,rtp=2", "pp=2", "fsdp=2,megatron=2", "zeropp=2x1", "atp=1x2"],
)
def test_the_others_are_taken(layout):
    check_device(run_with("param_bfloat16"), strategies=parse_parallel(layout))
