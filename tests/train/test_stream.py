"""Text that is read as it is needed: the windows of a token file, in blocks, from anywhere on; flat memory; runs."""

import json
import tracemalloc

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from commands import rotorch, write_run

from rotorch.core.errors import ConfigError, FinalFailure
from rotorch.train.data.batches import check_source, open_windows, prepare_corpus, prepare_sources
from rotorch.train.data.mixture import BLOCK
from rotorch.train.data.stream import MixedStreams, StreamPosition
from rotorch.train.metrics import read_metrics

LENGTH = 16


def documents(start, count):
    return [
        f"Document {n}: {'ring ' * (n % 7)}goes round." + " naïve ☕" * (n % 3) for n in range(start, start + count)
    ]


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n\n" for text in texts))


def write_parquet(path, texts):
    pyarrow.parquet.write_table(pyarrow.table({"n": list(range(len(texts))), "text": texts}), path, row_group_size=13)


@pytest.fixture
def text(tmp_path):
    """Three files, one of them with rows in groups."""
    folder = tmp_path / "text"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", documents(0, 40))
    write_parquet(folder / "b.parquet", [*documents(40, 30), None, ""])
    write_jsonl(folder / "c.jsonl", documents(70, 20))
    return folder


def checked(folder, *, stream, **options):
    options = {"sequence_length": LENGTH, "held_out_fraction": 0.0, "cache_dir": folder.parent / "cache", **options}
    return check_source(folder, stream=stream, **options)


def streamed(folder, *, stream=1, **options):
    return open_windows(checked(folder, stream=stream, **options), seed=3)[0]


def stored(folder, **options):
    """All windows of the token file, in file order."""
    source = checked(folder, stream=None, **options)
    prepare_corpus(source)
    train = open_windows(source, seed=3)[0]
    return [train.stored(index) for index in range(len(train))]


# ---------------------------------------------------------------- order


@pytest.mark.parametrize("tokens", ["bytes", "bpe"])
def test_windows_are_those_of_the_token_file(text, tokenizer_json, tokens):
    options = {"tokens": "bytes" if tokens == "bytes" else tokenizer_json}
    expected, windows = stored(text, **options), streamed(text, **options)
    twice = [windows.window(sample) for sample in range(2 * len(expected))]
    assert len(expected) > 60
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(twice, 2 * expected, strict=True))


def test_blocks_have_all_windows_in_an_order_of_their_own(text):
    expected = stored(text)
    windows = streamed(text, stream=8)
    plain = [window for window, _ in zip(windows.files.windows(StreamPosition()), range(24), strict=False)]
    plain = [ids.tolist() for ids, _ in plain]
    found = [windows.window(sample).tolist() for sample in range(24)]
    for block in range(3):
        ours, theirs = (part[8 * block : 8 * block + 8] for part in (found, plain))
        assert ours != theirs and sorted(ours) == sorted(theirs)
    orders = [windows.files.order(epoch) for epoch in range(6)]
    assert all(sorted(order) == [0, 1, 2] for order in orders) and len(set(map(tuple, orders))) > 1
    other = [streamed(text, stream=8).files.order(epoch) for epoch in range(6)]
    assert orders == other and len(expected) > 24


def test_a_stream_goes_on_from_every_sample(text, tokenizer_json):
    for tokens, buffer in (("bytes", 1), ("bytes", 5), (tokenizer_json, 5)):
        windows = streamed(text, stream=buffer, tokens=tokens)
        num_samples = 2 * len(stored(text, tokens=tokens)) + 3  # into a third epoch
        positions, found = [], []
        for sample in range(num_samples):
            positions.append(json.loads(json.dumps(windows.position(sample))))
            found.append(windows.window(sample))
        for sample in {*range(0, num_samples, 7), num_samples - 1}:
            again = streamed(text, stream=buffer, tokens=tokens)
            again.seek(positions[sample])
            ours = [again.window(number) for number in range(sample, min(sample + 9, num_samples))]
            assert all(np.array_equal(a, b) for a, b in zip(ours, found[sample:], strict=False)), sample


def test_ranks_that_skip_the_samples_of_others_see_the_same(text):
    whole = streamed(text, stream=6).global_batch(2, global_batch=12)["input_ids"]
    for ranks, rows in ((2, 3), (3, 2)):
        parts = []
        for rank in range(ranks):
            windows = streamed(text, stream=6)
            for step in range(3):  # each rank reads its own samples of every step
                options = dict(global_batch=12, micro_batch=rows, batch_rank=rank, num_batch_ranks=ranks)
                mine = [batch["input_ids"] for batch in windows.micro_batches(step, **options)]
            parts += mine
            assert windows.position(36) == streamed(text, stream=6).position(36)
        assert torch.equal(torch.cat(parts), whole)


def test_documents_are_kept_apart(text):
    windows = streamed(text, apart=True)
    batch = windows.to_batch([windows.window(sample) for sample in range(20)])
    ids, places = batch["input_ids"], batch["position_ids"]
    ends = (ids[:, :-1] == 256).nonzero()
    assert len(ends) > 3 and all(places[row, at + 1] == 0 for row, at in ends)


def test_sources_are_mixed_and_go_on(text, tmp_path):
    other = tmp_path / "other.jsonl"
    write_jsonl(other, ["REPORT " * 5] * 50)

    def mixed():
        return MixedStreams([streamed(text, stream=4), streamed(other, stream=4)], weights=[3, 1])

    windows = mixed()
    order = [windows.source_of(sample) for sample in range(2 * BLOCK)]
    assert [part for part, _ in order].count(1) == BLOCK // 2
    for part in range(2):  # each stream forwards
        assert [number for p, number in order if p == part] == list(range(len(order) // 4 * (3 - 2 * part)))
    found = [windows.window(sample).tolist() for sample in range(30)]
    assert {number for number, (part, _) in enumerate(order[:30]) if part == 1} == {
        number for number, ids in enumerate(found) if b"REPORT" in bytes(i for i in ids if i < 256)
    }
    windows, again = mixed(), mixed()
    assert [windows.window(sample).tolist() for sample in range(17)] == found[:17]
    again.seek(json.loads(json.dumps(windows.position(17))))
    assert [again.window(sample).tolist() for sample in range(17, 30)] == found[17:]
    [again.window(sample) for sample in range(30, 400)]
    shares = again.shares(400, names=["a", "b"])
    assert sum(share.samples for share in shares) == 400 and shares[0].epochs >= 1


# ---------------------------------------------------------------- memory, and what is refused


def test_memory_is_flat_and_nothing_is_on_disk(tmp_path):
    """A file of 100 blocks: no more memory for its second half than for its first."""
    file = tmp_path / "long.jsonl"
    with file.open("w") as stream:
        for number in range(20_000):
            stream.write(json.dumps({"text": f"{number} " + "a ring goes round and round " * 8}) + "\n")
    source = checked(file, stream=200, sequence_length=255)
    prepare_sources(source)
    windows = open_windows(source, seed=3)[0]
    peaks = []
    tracemalloc.start()
    try:
        for half in range(2):
            tracemalloc.reset_peak()
            for sample in range(half * 8_500, half * 8_500 + 8_500):
                windows.window(sample)
            peaks.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()
    assert 17_000 * 256 > 0.85 * file.stat().st_size > 4e6  # read nearly to its end
    assert max(peaks) < 2e6 and peaks[1] < 1.2 * peaks[0]
    assert not (tmp_path / "cache").exists()


def test_what_cannot_be_streamed_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text " * 99)
    with pytest.raises(ConfigError, match=r"a\.txt is no JSONL and no Parquet"):
        checked(tmp_path / "a.txt", stream=4)
    write_jsonl(tmp_path / "short.jsonl", ["short"])
    with pytest.raises(ConfigError, match="fewer than 17 tokens"):
        checked(tmp_path / "short.jsonl", stream=4)


def test_a_broken_record_is_named_when_the_stream_comes_to_it(tmp_path):
    file = tmp_path / "a.jsonl"
    write_jsonl(file, documents(0, 9))
    file.write_text(file.read_text() + '{"txt": "x"}\n')
    windows = streamed(file)
    windows.window(0)
    with pytest.raises(FinalFailure, match=r"data\.stream: .*line 19: no field 'text'"):
        [windows.window(sample) for sample in range(1, 99)]


def test_a_file_that_changes_meanwhile_is_named(text):
    windows = streamed(text)
    windows.window(0)
    write_jsonl(text / "c.jsonl", documents(70, 21))
    with pytest.raises(FinalFailure, match=r"c\.jsonl': changed while it was read"):
        [windows.window(sample) for sample in range(1, 999)]


def test_a_change_at_equal_size_is_known_by_the_ends_of_a_file(tmp_path):
    """A change between the two ends of a file that is longer than both is not seen: docs/how_to.md says so."""
    file, length = tmp_path / "a.jsonl", 40
    lines = [json.dumps({"text": f"{number:06d} goes round"}).ljust(length - 1) + "\n" for number in range(5000)]

    def fingerprint(changed=None):
        text = "".join(line.replace("goes", "went") if n == changed else line for n, line in enumerate(lines))
        file.write_text(text)
        assert file.stat().st_size == length * len(lines) > 3 << 16
        return prepare_sources(checked(file, stream=4))

    begun_with = fingerprint()
    assert fingerprint() == begun_with
    found = [fingerprint(changed) for changed in (0, (1 << 16) // length - 1, len(lines) - 1)]
    assert len({begun_with, *found}) == 4
    assert fingerprint(len(lines) // 2) == begun_with


# ---------------------------------------------------------------- runs


@pytest.fixture
def run_toml(text, tmp_path):
    path = write_run(tmp_path)
    changed = path.read_text().replace('source = "text.txt"', 'source = "text"\nstream = true\nshuffle_buffer = 10')
    path.write_text(changed.replace("held_out_fraction = 0.05", "held_out_fraction = 0"))
    return path


def losses(out):
    return [line["loss"] for line in read_metrics(out)]


def test_a_stream_is_trained_alike_under_layouts_and_goes_on_under_another_one(run_toml, tmp_path, warm):
    settings = ["train.global_batch=4", "optimizer.schedule=constant"]
    for layout, rows in {"single": 4, "rtp=2": 2}.items():
        told = [*settings, f"train.micro_batch={rows}", "--parallel", layout, f"train.out={tmp_path / layout}"]
        done = rotorch(tmp_path / "log", "train", run_toml, *told)
        assert done.code == 0, done.stderr
        assert "read as it is needed, shuffled within 10 samples" in done.stdout and "into" not in done.stdout
    assert losses(tmp_path / "rtp=2") == pytest.approx(losses(tmp_path / "single"), rel=1e-5)
    parts = ["train", run_toml, *settings, f"train.out={tmp_path / 'parts'}"]
    assert rotorch(tmp_path / "log", *parts, "train.micro_batch=4", "train.steps=3").code == 0
    for change, said in {"data.shuffle_buffer=9": "data.shuffle_buffer = 10", "data.stream=false": "data.s"}.items():
        more = ["data.shuffle_buffer=1000"] if change == "data.stream=false" else []
        other = rotorch(tmp_path / "log", *parts, "train.micro_batch=4", "--resume", change, *more)
        assert other.code == 2 and f"was written by a run with {said}" in other.stderr, other.stderr
    text = run_toml.parent / "text" / "c.jsonl"
    begun_with = text.read_text()
    text.write_text(begun_with.replace("Document 89", "Document 98"))
    other = rotorch(tmp_path / "log", *parts, "train.micro_batch=4", "--resume")
    assert other.code == 2 and "is not the text that" in other.stderr, other.stderr
    text.write_text(begun_with)
    went_on = rotorch(tmp_path / "log", *parts, "train.micro_batch=2", "--parallel", "rtp=2", "--resume")
    assert went_on.code == 0, went_on.stderr
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "single"), rel=1e-5)
    assert not list((tmp_path / "cache").glob("*.tokens"))


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (["data.held_out_fraction=0.1"], "so nothing is held out of it. Write data.held_out_fraction=0"),
        (["data.stream=false"], "data.shuffle_buffer = 10 is of streams"),
        (["data.kind=instructions"], "data.stream reads text"),
    ],
)
def test_what_does_not_go_with_a_stream_is_refused(run_toml, told, words):
    done = rotorch(run_toml.parent / "log", "train", run_toml, *told)
    assert done.code == 2 and words in done.stderr, done.stderr
