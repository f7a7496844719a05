"""A checkpoint is on the disk before it has its name, and its name is before an earlier one goes."""

import pytest
import torch
from disk import Disk
from three_weights import make, step

from rotorch.testing.ranks import run_ranks
from rotorch.train.checkpoint.saving import save


@pytest.fixture(scope="module", autouse=True)
def imported():
    """Imports here what torch imports on first use, so that the forked rank does not do it."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.AdamW([parameter]).step()


def save_to_a_watched_disk(run_dir):
    """Three saves, of which the second replaces the first and the third has the second's name."""
    with pytest.MonkeyPatch.context() as patch:
        disk, state = Disk(patch), make()
        for num_steps in (1, 1, 0):
            for _ in range(num_steps):
                step(state)
            disk.check(save(run_dir, state, keep=1))
        disk.check_made_directories()


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name_and_before_others_go(tmp_path):
    run_ranks(save_to_a_watched_disk, tmp_path / "run", num_ranks=1)
