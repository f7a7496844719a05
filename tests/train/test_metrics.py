"""`metrics.jsonl` where it cannot be written, or is not what was written."""

import errno

import pytest
from commands import rotorch, write_run

from rotorch.core.errors import ConfigError, RankFailure
from rotorch.train.metrics import METRICS, MetricsFile, StepRecord, read_metrics


class Full:
    def __init__(self, stream):
        self.fileno = stream.fileno

    def write(self, text):
        return len(text)

    def flush(self):
        raise OSError(errno.ENOSPC, "No space left on device")

    close = flush


def test_a_full_disk_is_said_with_the_files_name(tmp_path):
    file = MetricsFile(tmp_path, after_step=0)
    stream, file._stream = file._stream, Full(file._stream)
    record = StepRecord(step=1, loss=1.0, tokens=1, tokens_per_s=1.0, grad_norm=1.0, lr=1.0, peak_bytes=1, step_s=1.0)
    with pytest.raises(RankFailure, match=rf"{METRICS}: No space left on device"):
        file.on_step(record)
    stream.close()


LINES = b'{"step": 1, "loss": 2.5}\n', b'{"step": 2, "loss": 2.4}\n'


@pytest.mark.parametrize("tail", [b"", b'{"step": 3, "lo', b'{"step": 3}', b"\0" * 100, b"\xff"])
def test_a_last_line_that_was_cut_off_is_left_out(tail, tmp_path):
    (tmp_path / METRICS).write_bytes(b"".join(LINES) + tail)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]
    MetricsFile(tmp_path, after_step=1).close()
    assert (tmp_path / METRICS).read_bytes() == LINES[0]


@pytest.mark.parametrize("line", [b"", b"\xff}", b"{]}", b"5", b'{"loss": 2.5}', b'{"step": "1"}', b"[" * 99_999])
def test_a_line_that_is_none_of_a_run_is_named_and_nothing_is_written(line, tmp_path):
    content = LINES[0] + line + b"\n" + LINES[1]
    (tmp_path / METRICS).write_bytes(content)
    for read in (read_metrics, lambda out: MetricsFile(out, after_step=1)):
        with pytest.raises(
            ConfigError, match=rf"{METRICS}, line 2: no step of a run\. Repair the line, or move the file"
        ):
            read(tmp_path)
    assert (tmp_path / METRICS).read_bytes() == content


def test_a_run_is_not_resumed_with_a_line_that_is_none_of_it(tmp_path, warm):
    """Found before a rank starts and before anything is written: rank 0 alone would find it there."""
    run, out = write_run(tmp_path), tmp_path / "run"
    out.mkdir()
    (out / METRICS).write_bytes(b"hello\n" + LINES[0])
    done = rotorch(tmp_path / "log", "train", run, "--parallel", "rtp=2", "--resume")
    assert done.code == 2 and done.stderr.count("\n") == 1, done.stderr
    assert f"{METRICS}, line 1: no step of a run. Repair the line, or move the file away" in done.stderr
    assert [path.name for path in out.iterdir()] == [METRICS]


def test_metrics_that_are_no_file_are_named(tmp_path):
    (tmp_path / METRICS).mkdir()
    with pytest.raises(ConfigError, match=rf"{METRICS}: cannot read: Is a directory\. Move it away"):
        read_metrics(tmp_path)
