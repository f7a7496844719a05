import json
import logging
import multiprocessing
import os
import shutil
import tracemalloc
from collections import namedtuple

import numpy as np
import pytest
from disk import Disk

from rotorch.core.errors import ConfigError
from rotorch.train.data import batches as data
from rotorch.train.data import corpus as corpus_module
from rotorch.train.data.batches import (
    TokenFile,
    check_source,
    default_cache_dir,
    open_tokens,
    prepare_corpus,
    train_and_held_out,
)
from rotorch.train.data.token_file import HEADER_BYTES, DamagedTokenFile, building, write_token_file


@pytest.fixture
def folder(tmp_path, english):
    path = tmp_path / "corpus"
    path.mkdir()
    (path / "a.txt").write_text(english, encoding="utf-8")
    (path / "b.txt").write_bytes(b"caf\xe9 " * 50)
    return path


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def checked(folder, cache, **options):
    return check_source(folder, cache_dir=cache, suffixes=[".txt"], **options)


def names(cache):
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock") if cache.exists() else []


def test_bytes_reach_the_ranks_exactly(folder, cache):
    source = checked(folder, cache, sequence_length=16)
    assert not cache.exists()  # checking writes nothing
    file = prepare_corpus(source)
    expected = (folder / "a.txt").read_bytes(), (folder / "b.txt").read_bytes()
    assert file.ids.tolist() == [*expected[0], 256, *expected[1], 256] and file.ids.dtype == np.uint16
    assert file.header.text_bytes == sum(map(len, expected)) and file.header.num_documents == 2
    assert names(cache) == [file.path.name]
    with pytest.raises(ValueError, match="read-only"):
        file.ids[0] = 1

    opened = TokenFile.open(file.path, verify=True)
    assert opened.fingerprint == file.fingerprint and opened.header == file.header
    train, held_out = train_and_held_out(opened, tokens=open_tokens("bytes"), sequence_length=16, seed=1)
    assert len(train) + len(held_out) == len(file.ids) // 17 and len(held_out) == 1
    batch = next(train.micro_batches(0, global_batch=4, micro_batch=2, batch_rank=1, num_batch_ranks=2))
    assert np.array_equal(batch["input_ids"][0], train.window(2)[:-1])
    assert np.array_equal(batch["shift_labels"][0], train.window(2)[1:])


def test_a_tokenizer_loses_and_invents_no_byte(folder, cache, tokenizer_json):
    (folder / "b.txt").unlink()
    file = prepare_corpus(checked(folder, cache, tokens=tokenizer_json, sequence_length=8))
    tokens = open_tokens(tokenizer_json)
    assert tokens.decode(file.ids) == (folder / "a.txt").read_text("utf-8")
    assert tokens.num_bytes(file.ids) == file.header.text_bytes == (folder / "a.txt").stat().st_size
    whole, nothing = train_and_held_out(file, tokens=tokens, sequence_length=8, seed=0, held_out_fraction=0)
    targets = np.concatenate([whole.stored(index)[1:] for index in range(len(whole))])
    assert sum(part.num_bytes for part in whole.evaluation_batches(micro_batch=3)) == tokens.num_bytes(targets)
    assert len(nothing) == 0 and list(nothing.evaluation_batches(micro_batch=3)) == []


def test_the_corpus_is_streamed(folder, cache, monkeypatch):
    monkeypatch.setattr(corpus_module, "PIECE_BYTES", 64)
    calls = []
    whole = prepare_corpus(checked(folder, cache), progress=lambda done, total: calls.append((done, total)))
    text_bytes = whole.header.text_bytes
    assert len(calls) > 5 and calls == sorted(calls) and calls[-1] == (text_bytes, text_bytes)
    monkeypatch.undo()
    assert prepare_corpus(checked(folder, cache.with_name("other"))).fingerprint == whole.fingerprint


def test_a_corpus_is_tokenised_once(folder, cache, monkeypatch, tokenizer_json):
    first = prepare_corpus(checked(folder, cache))
    with monkeypatch.context() as patch:
        patch.setattr(data, "_build", lambda *_, **__: pytest.fail("built again"))
        assert prepare_corpus(checked(folder, cache)).fingerprint == first.fingerprint
    assert prepare_corpus(checked(folder, cache, tokens=tokenizer_json)).path != first.path
    (folder / "c.txt").write_text("more")
    assert prepare_corpus(checked(folder, cache)).header.num_documents == 3
    assert len(names(cache)) == 3


def test_another_text_of_the_same_size_and_time_is_tokenised(folder, cache):
    """As tools leave it that set times: `cp -p`, `rsync -a`, archives with all times the same."""
    file = min(folder.glob("*.txt"))
    before, status = prepare_corpus(checked(folder, cache)), file.stat()
    file.write_bytes(file.read_bytes()[::-1])
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file.stat().st_mtime_ns == status.st_mtime_ns and file.stat().st_size == status.st_size
    assert prepare_corpus(checked(folder, cache)).fingerprint != before.fingerprint


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "header": lambda path: flip(path, 30),
    "first id": lambda path: flip(path, HEADER_BYTES),
    "last id": lambda path: flip(path, -1),
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "truncated to the header": lambda path: os.truncate(path, HEADER_BYTES),
    "truncated in the header": lambda path: os.truncate(path, 20),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0\0"),
    "foreign": lambda path: path.write_bytes(b"\x93NUMPY" + b"\n\xff" * 5000),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_recognised_and_rebuilt(folder, cache, damage, caplog):
    file = prepare_corpus(checked(folder, cache))
    path, fingerprint = file.path, file.fingerprint
    del file
    DAMAGES[damage](path)
    with pytest.raises(DamagedTokenFile, match=r"damaged \(.*Prepare the corpus again") as caught:
        TokenFile.open(path, verify=True)
    assert "\n" not in str(caught.value)
    with caplog.at_level(logging.WARNING):
        assert prepare_corpus(checked(folder, cache)).fingerprint == fingerprint
    assert len(caplog.records) == 1 and "rebuilding it now" in caplog.text
    assert TokenFile.open(path, verify=True).fingerprint == fingerprint


def test_a_missing_token_file_is_named(tmp_path):
    with pytest.raises(DamagedTokenFile, match=r"x.tokens': no such file. Prepare the corpus first"):
        TokenFile.open(tmp_path / "x.tokens")
    with pytest.raises(DamagedTokenFile, match="cannot read"):
        TokenFile.open(tmp_path)


def test_a_killed_build_leaves_nothing_that_looks_whole(folder, cache):
    source = checked(folder, cache)

    def die_halfway():
        def progress(done, total):
            os._exit(9)

        prepare_corpus(source, progress=progress)

    process = multiprocessing.get_context("fork").Process(target=die_halfway)
    process.start()
    process.join()
    assert process.exitcode == 9 and not source.path.exists()
    assert prepare_corpus(source).header.num_documents == 2  # the dead process' lock and partial file are no obstacle
    assert names(cache) == [source.path.name]


def test_a_cache_is_on_the_disk_before_it_has_its_name(folder, cache, monkeypatch):
    disk, source = Disk(monkeypatch), checked(folder, cache)
    prepare_corpus(source)
    disk.check(source.path)


def test_an_interrupted_build_leaves_nothing(folder, cache):
    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_corpus(checked(folder, cache), progress=interrupt)
    assert names(cache) == []


def test_only_one_process_builds(folder, cache):
    context = multiprocessing.get_context("fork")
    source, built, fingerprints = checked(folder, cache), context.Value("i", 0), context.SimpleQueue()

    def build(_):
        calls = []
        file = prepare_corpus(source, progress=lambda done, total: calls.append(done))
        with built.get_lock():
            built.value += bool(calls)
        fingerprints.put(file.fingerprint)

    processes = [context.Process(target=build, args=(number,)) for number in range(4)]
    for process in processes:
        process.start()
    assert len({fingerprints.get() for _ in processes}) == 1
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert built.value == 1 and names(cache) == [source.path.name]


def test_a_waiting_process_says_so(cache, caplog):
    path = cache / "x.tokens"

    def hold(ready, release):
        with building(path):
            ready.set()
            release.wait(10)

    context = multiprocessing.get_context("fork")
    ready, release = context.Event(), context.Event()
    process = context.Process(target=hold, args=(ready, release))
    process.start()
    assert ready.wait(10)

    class Releasing(logging.Handler):
        def emit(self, record):
            release.set()

    logger = logging.getLogger("rotorch.train.data.token_file")
    handler = Releasing()
    logger.addHandler(handler)
    try:
        with caplog.at_level(logging.INFO), building(path):
            assert "another process is building it; waiting" in caplog.text
    finally:
        logger.removeHandler(handler)
        release.set()
        process.join()


def test_a_corpus_too_short_is_found_at_the_earliest_moment(folder, cache, tokenizer_json):
    with pytest.raises(ConfigError, match=r"\d+ tokens, but a training and a held-out window of sequence_length 1000"):
        checked(folder, cache, sequence_length=1000)
    assert not cache.exists()
    # How many tokens a tokenizer makes of it is known only afterwards; then nothing is left either.
    source = checked(folder, cache, tokens=tokenizer_json, sequence_length=1000, held_out_fraction=0)
    with pytest.raises(ConfigError, match=r"\d+ tokens, but one window of sequence_length 1000 need 1001"):
        prepare_corpus(source)
    assert names(cache) == []
    prepare_corpus(checked(folder, cache, tokens=tokenizer_json))
    with pytest.raises(ConfigError, match="but one window"):  # and it is checked on a cache that was there too
        prepare_corpus(source)


def test_arguments_are_checked_before_anything_is_written(folder, cache, tokenizer_json):
    for options, message in [
        ({"sequence_length": 0}, "sequence_length 0"),
        ({"sequence_length": 8, "held_out_fraction": 0.9}, "held_out_fraction 0.9"),
        ({"model_vocab": 256}, "the tokens need 257 ids, the model has 256"),
        ({"tokens": folder / "none.json"}, "no such file"),
        ({"tokens": tokenizer_json, "eos_token": "</s>"}, "eos_token '</s>' is not one of its tokens"),
    ]:
        with pytest.raises(ConfigError, match=message):
            checked(folder, cache, **options)
    assert not cache.exists()


Usage = namedtuple("Usage", "free")


def test_a_full_disk_is_found_before(folder, cache, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(free=1000))
    with pytest.raises(ConfigError, match=r"needs about .* KiB, 1000 B are free. .*cache_dir="):
        checked(folder, cache)
    assert not cache.exists()


def test_a_cache_that_is_there_needs_no_room(folder, cache, monkeypatch):
    prepare_corpus(checked(folder, cache))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(free=0))
    prepare_corpus(checked(folder, cache))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, a device that is always full")
def test_a_disk_that_fills_up_leaves_nothing(tmp_path):
    path = tmp_path / "x.tokens"
    path.with_suffix(".partial").symlink_to("/dev/full")
    with pytest.raises(ConfigError, match="no room left on the disk after 100000 tokens"):
        write_token_file(path, arrays=[np.zeros(100_000, np.uint16)], header=lambda num_tokens, crc32: None)
    assert names(tmp_path) == []


def test_a_cache_directory_that_cannot_be_written(folder, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"file/cache': '.*file' is a file\. Write cache_dir="):
        checked(folder, tmp_path / "file" / "cache")
    source = checked(folder, tmp_path / "later" / "cache")
    (tmp_path / "later").write_text("in the way")
    with pytest.raises(ConfigError, match=r"later/cache': cannot write: .*cache_dir="):
        prepare_corpus(source)


def test_a_file_that_changes_meanwhile_is_noticed(folder, cache):
    def meddle(done, total):
        (folder / "b.txt").write_text("changed")

    with pytest.raises(ConfigError, match="a file changed while it was read"):
        prepare_corpus(checked(folder, cache), progress=meddle)
    assert names(cache) == []


def test_a_corpus_of_empty_records_is_empty(tmp_path, cache):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n' * 3)
    with pytest.raises(ConfigError, match="empty: 1 files without a byte of text"):
        prepare_corpus(check_source(tmp_path / "a.jsonl", cache_dir=cache))
    assert names(cache) == []


def test_a_broken_record_far_down_is_found_before_any_rank_starts(tmp_path, cache):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' * 500 + '{"text": \n')
    with pytest.raises(ConfigError, match=r"a.jsonl', line 501: not valid JSON"):
        prepare_corpus(check_source(tmp_path / "a.jsonl", cache_dir=cache))
    assert names(cache) == []


def test_the_tokenizer_must_be_the_one_that_made_the_file(folder, cache, tokenizer_json):
    file = prepare_corpus(checked(folder, cache))
    with pytest.raises(ConfigError, match=r"made with tokens 'bytes', opened with .*tokenizer.json"):
        train_and_held_out(file, tokens=open_tokens(tokenizer_json), sequence_length=8, seed=0)


def test_a_header_holds_any_name(tmp_path, cache):
    folder = tmp_path / ("☕" * 80) / ("\udcff\x01" * 60)
    folder.mkdir(parents=True)
    (folder / "a.txt").write_text("text")
    assert TokenFile.open(prepare_corpus(check_source(folder, cache_dir=cache)).path).header.num_tokens == 5


def test_the_cache_is_where_the_desktop_standard_says(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "rotorch"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "rotorch"


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_memory_does_not_grow_with_the_text(kind, tmp_path):
    """Bytes that Python and NumPy take while a text is tokenised, at their peak: the same for three times the text."""
    peaks = []
    for number in (6, 18):
        path = tmp_path / f"{number}.{kind}"
        line = "Slices go round; weights stay at home. " * 200
        with path.open("w") as stream:
            for _ in range(number * (1 << 20) // len(line)):
                stream.write(json.dumps({"text": line}) + "\n" if kind == "jsonl" else line)
        checked = check_source(path, sequence_length=16, cache_dir=tmp_path / "cache")
        tracemalloc.start()
        try:
            prepare_corpus(checked)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0] and peaks[1] < 12 << 20
