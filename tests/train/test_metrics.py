"""`metrics.jsonl` where it cannot be written."""

import errno

import pytest

from rotorch.core.errors import RankFailure
from rotorch.train.metrics import METRICS, MetricsFile, StepRecord


class Full:
    def write(self, text):
        return len(text)

    def flush(self):
        raise OSError(errno.ENOSPC, "No space left on device")

    close = flush


def test_a_full_disk_is_said_with_the_files_name(tmp_path):
    file = MetricsFile(tmp_path, after_step=0)
    file.close()
    file._stream = Full()
    record = StepRecord(step=1, loss=1.0, tokens=1, tokens_per_s=1.0, grad_norm=1.0, lr=1.0, peak_bytes=1, step_s=1.0)
    with pytest.raises(RankFailure, match=rf"{METRICS}: No space left on device"):
        file.on_step(record)
    file.close()
