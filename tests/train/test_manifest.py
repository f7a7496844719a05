"""Files of a checkpoint that cannot be read are named, with the reason."""

import pytest
from three_weights import make

from rotorch.core.errors import ConfigError
from rotorch.train.checkpoint.manifest import DamagedCheckpoint
from rotorch.train.checkpoint.saving import check, latest, save
from rotorch.train.checks.resuming import find_resume


def test_a_file_that_cannot_be_looked_at_is_not_called_missing(tmp_path):
    save(tmp_path, make(), keep=1)
    (file,) = latest(tmp_path).glob("*.safetensors")
    file.rename(tmp_path / "aside")
    file.symlink_to(file.name)
    said = rf"^checkpoint: {file}: cannot be read: Too many levels of symbolic links$"
    with pytest.raises(ConfigError, match=said) as caught:
        check(file.parent)
    assert not isinstance(caught.value, DamagedCheckpoint)
    file.unlink()
    file.mkdir()
    with pytest.raises(ConfigError, match=r"truncated|changed"):
        check(file.parent)


def test_where_no_checkpoint_is_whole_that_is_said_once(tmp_path, caplog):
    for step in (1, 2):
        path = tmp_path / "checkpoints" / f"step-0000000{step}"
        path.mkdir(parents=True)
        (path / "manifest.json").write_bytes(b"{")
    nothing = dict.fromkeys(("config", "sizes", "model_config", "spec", "source"))
    with pytest.raises(ConfigError, match=r"no checkpoint in .*/checkpoints is whole, the newest one is step-00000002"):
        find_resume(tmp_path, **nothing)
    first, last = caplog.messages
    assert "step-00000002" in first and first.endswith("(skipped; looking for the one before)")
    assert "step-00000001" in last and last.endswith("(skipped; there is none before it)")
