"""Refusals of a trainer under a layout: one line when it is made, before anything else."""

import pytest

pytest.importorskip("trl")
pytest.importorskip("peft")

import scripts
from transformers import Trainer, TrainingArguments

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.hf import TrainerMixin


class OnRanks(TrainerMixin, Trainer):
    pass


def made(tmp_path, *, layout="rtp=2", model=None, **arguments):
    given = scripts.arguments(TrainingArguments, tmp_path, None, **arguments)
    return OnRanks(model=scripts.model() if model is None else model, args=given, layout=layout)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"torch_compile": True}, "torch_compile=True would trace"),
        ({"auto_find_batch_size": True}, "Write per_device_train_batch_size"),
        ({"optim": "adafactor"}, "optim='adafactor' may want whole matrices"),
        ({"save_on_each_node": True}, "Give output_dir on a shared disk"),
        ({"bf16_full_eval": True}, "would convert weights"),
    ],
)
def test_arguments_that_cannot_be_right(tmp_path, arguments, words):
    with pytest.raises(ConfigError, match="TrainerMixin: ") as caught:
        made(tmp_path / "out", **arguments)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore")
def test_layouts_that_cannot_be_right(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="write layout='single', or give a model that"):
        made(tmp_path, layout=None)
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="write layout='rtp=3', or give a model that"):
        OnRanks(model=scripts.model())
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(ConfigError, match="spam"):
        made(tmp_path, layout="spam=2")
    with pytest.raises(ConfigError, match="Write model=model_init"):
        OnRanks(model_init=scripts.model, layout="rtp=2")


@pytest.mark.filterwarnings("ignore")
def test_models_that_cannot_be_right(tmp_path):
    with rotorch.on_meta():
        model = scripts.model()
    with pytest.raises(ConfigError, match="lies on meta"):
        made(tmp_path, model=model, layout="single")


@pytest.mark.filterwarnings("ignore")
def test_what_accelerate_was_told(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    with pytest.raises(ConfigError, match="accelerate launch was given --dynamo_backend"):
        made(tmp_path, layout="single")
