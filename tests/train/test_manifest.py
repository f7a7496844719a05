"""Files of a checkpoint that cannot be read are named, with the reason."""

import pytest
from three_weights import make

from rotorch.core.errors import ConfigError
from rotorch.train.checkpoint.manifest import DamagedCheckpoint
from rotorch.train.checkpoint.saving import check, latest, save


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
