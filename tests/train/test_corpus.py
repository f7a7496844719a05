import json
import logging
import re
import sysconfig
from pathlib import Path

import pytest

from rotorch.core.errors import ConfigError
from rotorch.train.data import corpus as corpus_module
from rotorch.train.data.corpus import find_corpus


def documents(corpus):
    whole, parts = [], []
    for data, ends in corpus.pieces():
        parts.append(data)
        if ends:
            whole.append(b"".join(parts))
            parts = []
    assert not parts
    return whole


def write_parquet(path, **columns):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def write_jsonl(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_a_text_file_is_one_document_byte_for_byte(tmp_path):
    data = b"line\r\n\xff\xfe not UTF-8\n"
    (tmp_path / "a.txt").write_bytes(data)
    corpus = find_corpus(tmp_path / "a.txt")
    assert documents(corpus) == [data]
    assert corpus.text_bytes == len(data) and corpus.is_exact


@pytest.mark.parametrize("size", [1, 9, 10, 11, 20, 25])
def test_a_long_file_comes_in_pieces(tmp_path, monkeypatch, size):
    monkeypatch.setattr(corpus_module, "PIECE_BYTES", 10)
    data = bytes(range(65, 65 + size))
    (tmp_path / "a.txt").write_bytes(data)
    pieces = list(find_corpus(tmp_path / "a.txt").pieces())
    assert b"".join(piece for piece, _ in pieces) == data
    assert all(0 < len(piece) <= 10 for piece, _ in pieces)
    assert [ends for _, ends in pieces] == [False] * (len(pieces) - 1) + [True]


def test_a_directory_is_read_recursively_in_sorted_order(tmp_path, caplog):
    for name, data in {
        "b.txt": b"B",
        "sub/a.md": b"SA",
        "a.py": b"A",
        ".git/x.txt": b"hidden",
        ".rc": b"hidden",
        "empty.txt": b"",
        "image.bin": b"\x89\0\x01",
        "latin.txt": b"caf\xe9 au lait",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    with caplog.at_level(logging.INFO):
        assert documents(find_corpus(tmp_path)) == [b"A", b"B", b"SA"]
    assert "4 of 6 files read" in caplog.text and "image.bin" in caplog.text
    assert "1 empty documents left out" in caplog.text


@pytest.mark.parametrize("suffixes", [[".txt", ".md"], ["*.txt", "*.md"], ("b.txt", "[a-c].md")])
def test_suffixes_choose_files(tmp_path, suffixes):
    for name in ("b.txt", "c.md", "d.py"):
        (tmp_path / name).write_text(name)
    assert documents(find_corpus(tmp_path, suffixes=suffixes)) == [b"b.txt", b"c.md"]


def test_a_character_cut_by_the_look_at_a_files_start_is_still_text(tmp_path):
    (tmp_path / "a.txt").write_text("x" * (corpus_module._SNIFF_BYTES - 1) + "é", encoding="utf-8")
    assert len(find_corpus(tmp_path).files) == 1


def test_jsonl_takes_one_document_a_line(tmp_path):
    path = write_jsonl(
        tmp_path / "a.jsonl",
        {"text": "one é", "n": 1},
        {"text": "", "n": {"x": 2}},
        {"text": None},
        {"text": "lone \ud800", "n": "three"},
    )
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes() + b"\n  \n" + b'{"text": "last"}')
    assert documents(find_corpus(path)) == ["one é".encode(), b"lone ?", b"last"]


def test_parquet_files_are_read(tmp_path):
    write_parquet(tmp_path / "1.parquet", body=["one é", None, "", "two"], n=[1, 2, 3, 4])
    write_parquet(tmp_path / "0.parquet", body=["zero"])
    corpus = find_corpus(tmp_path, text_field="body")
    assert documents(corpus) == [b"zero", "one é".encode(), b"two"]
    assert corpus.text_bytes > 0 and not corpus.is_exact


def test_records_are_preferred_to_the_readme_beside_them(tmp_path, caplog):
    write_jsonl(tmp_path / "a.jsonl", {"text": "record"})
    (tmp_path / "README.md").write_text("about")
    with caplog.at_level(logging.INFO):
        assert documents(find_corpus(tmp_path)) == [b"record"]
    assert "README.md" in caplog.text


def test_the_standard_library_is_always_there():
    corpus = find_corpus("stdlib")
    paths = [file.path for file in corpus.files]
    root = Path(sysconfig.get_path("stdlib"))
    assert root / "argparse.py" in paths and root / "json/decoder.py" in paths
    assert corpus.text_bytes > 5_000_000
    assert not any({"site-packages", "test", "tests"} & set(path.relative_to(root).parts) for path in paths)
    assert paths == [file.path for file in find_corpus("stdlib").files]


def test_the_digest_follows_name_size_time_and_field(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("text")
    corpus = find_corpus(path)
    first = corpus.digest()
    assert corpus.digest() == first
    assert find_corpus(path, text_field="body").digest() != first
    path.write_text("longer text")
    second = corpus.digest()
    path.touch()
    assert len({first, second, corpus.digest()}) == 3


def fails(match, source, **options):
    with pytest.raises(ConfigError, match=match) as caught:
        list(find_corpus(source, **options).pieces())
    assert "\n" not in str(caught.value)


def test_what_is_not_there_is_named(tmp_path):
    (tmp_path / "corpus.txt").write_text("x")
    fails("corpu.txt': no such file or directory.*corpus.txt", tmp_path / "corpu.txt")
    fails("no path given", "")
    (tmp_path / "empty").mkdir()
    fails("holds no files", tmp_path / "empty")
    fails(r"no file matches suffixes \['\*.rst'\]; the directory holds .txt \(1\)", tmp_path, suffixes=[".rst"])


def test_nothing_to_read_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"")
    fails("empty: 1 files", tmp_path / "a.txt")
    fails("empty: 1 files", tmp_path)
    (tmp_path / "a.txt").write_bytes(b"\0\1")
    fails("none of its 1 files is UTF-8 text", tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 3: not valid JSON: .* at column 2"),
        ("9" * 5000, "line 3: not valid JSON: Exceeds the limit"),
        ("[" * 100_000, "line 3: not valid JSON"),
        ("[1]", "line 3: of type list; every line must be an object"),
        ('{"test": "x"}', "line 3: no field 'text'.*did you mean 'test'.*the fields are test"),
        ('{"text": 7}', "line 3: field 'text' is of type int, not a string"),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n\n' + line + '\n{"text": "good"}\n')
    fails(re.escape(str(path)) + "', " + message, path)


def test_a_broken_first_record_is_found_before_reading(tmp_path):
    with pytest.raises(ConfigError, match="line 1: no field 'text'"):
        find_corpus(write_jsonl(tmp_path / "a.jsonl", {"body": "x"}))


def test_broken_parquet_is_found_before_reading(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", txt=["x"], number=[1])
    messages = {"text": "no field 'text'.*did you mean 'txt'", "number": "is of type int64, not a string"}
    for field, message in messages.items():
        with pytest.raises(ConfigError, match=message):
            find_corpus(path, text_field=field)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ConfigError, match="not a readable Parquet file"):
        find_corpus(path, text_field="txt")


def test_a_parquet_file_damaged_inside_is_named(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", text=[f"{n} words" for n in range(1000)])
    data = bytearray(path.read_bytes())
    data[4:200] = b"\xff" * 196
    path.write_bytes(data)
    fails("a.parquet': not a readable Parquet file", path)


def test_a_file_that_vanishes_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    corpus = find_corpus(tmp_path)
    (tmp_path / "a.txt").unlink()
    with pytest.raises(ConfigError, match=r"a.txt': cannot read: No such file"):
        list(corpus.pieces())
    with pytest.raises(ConfigError, match=r"a.txt': cannot read: No such file"):
        corpus.digest()
