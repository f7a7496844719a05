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


def test_where_no_checkpoint_is_whole_the_newest_says_why_and_once(tmp_path, caplog):
    for step in (1, 2):
        path = tmp_path / "checkpoints" / f"step-0000000{step}"
        path.mkdir(parents=True)
        (path / "manifest.json").write_bytes(b"{")
    nothing = dict.fromkeys(("config", "sizes", "model_config", "spec", "source"))
    with pytest.raises(ConfigError, match=r"step-00000002/manifest\.json: .* No whole checkpoint is there: "):
        find_resume(tmp_path, **nothing)
    assert not caplog.messages
    assert latest(tmp_path) is None
    assert [line.partition("step-0000000")[2][:1] for line in caplog.messages] == ["2", "1"]
    assert all("(skipped; " in line for line in caplog.messages)
