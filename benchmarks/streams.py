"""Rate and memory of streams: JSONL that is read, tokenised and packed as samples are taken, on one core.

    python benchmarks/streams.py --json benchmarks/results/streams.json

Records are pieces of the sources of Python's own standard library, drawn by a seed. One tokenizer is bytes, the other
one a byte-level vocabulary of 8,000, learnt from these sources. Samples are taken one by one, as a run takes them,
until the file was read once, in a process of its own. Rates are in tokens per second of the processor, in which the
waiting for other programs is not counted. Resident memory is that of the process behind the first block, and the most
behind later ones.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rotorch.bench.record import describe_origin, load_average
from rotorch.train.data.batches import check_source, open_windows
from rotorch.train.data.corpus import STDLIB, find_corpus
from rotorch.train.data.tokens import BYTES

VOCABULARY, SEQUENCE_LENGTH, BUFFER = 8000, 1024, 1000
SHORTEST, LONGEST = 500, 4000
"""Characters of a record."""


def write_records(file: Path, *, num_bytes: int) -> None:
    """Writes records until the file has so many bytes."""
    text = "".join(data.decode("utf-8", errors="ignore") for data, _ in find_corpus(STDLIB).pieces())
    draw, written = random.Random(0), 0
    with file.open("w", encoding="utf-8") as stream:
        while written < num_bytes:
            start = draw.randrange(len(text) - LONGEST)
            line = json.dumps({"text": text[start : start + draw.randrange(SHORTEST, LONGEST)]}) + "\n"
            written += stream.write(line)


def learn_vocabulary(file: Path) -> None:
    """Writes the tokenizer.json of a byte-level vocabulary, learnt from the standard library."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    texts = [data.decode("utf-8", errors="ignore") for data, _ in find_corpus(STDLIB).pieces()]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(file))


def measure(source: Path, *, tokens: str) -> dict[str, Any]:
    """Takes the samples of one epoch; returns rates and resident memory."""
    checked = check_source(
        source,
        tokens=tokens,
        eos_token=None if tokens == BYTES else "<|endoftext|>",
        sequence_length=SEQUENCE_LENGTH,
        held_out_fraction=0.0,
        cache_dir=source.parent / "cache",
        stream=BUFFER,
    )
    windows = open_windows(checked, seed=0)[0]
    process, samples, resident = psutil.Process(), 0, []
    wall, used = time.monotonic(), time.process_time()
    while windows.epochs < 1:
        windows.window(samples)
        samples += 1
        if samples % BUFFER == 1:
            resident.append(process.memory_info().rss)
    used, wall = time.process_time() - used, time.monotonic() - wall
    assert not (source.parent / "cache").exists(), "a stream writes nothing"
    return {
        "tokens": samples * SEQUENCE_LENGTH,
        "tokens_per_processor_s": samples * SEQUENCE_LENGTH / used,
        "processor_s": used,
        "wall_s": wall,
        "first_resident_bytes": resident[0],
        "most_resident_bytes": max(resident),
    }


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    record: dict[str, Any] = {"origin": describe_origin(), "megabytes": asked.megabytes, "rows": {}}
    with tempfile.TemporaryDirectory() as directory:
        source, vocabulary = Path(directory, "text.jsonl"), Path(directory, "tokenizer.json")
        write_records(source, num_bytes=asked.megabytes * 10**6)
        learn_vocabulary(vocabulary)
        for name, tokens in (("bytes", BYTES), (f"vocabulary of {VOCABULARY}", str(vocabulary))):
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:  # with no memory of what came before
                row = record["rows"][name] = fresh.submit(measure, source, tokens=tokens).result()
            print(
                f"{name:<20} {row['tokens_per_processor_s'] / 1e6:6.2f} M tokens per second of the processor, "
                f"{row['first_resident_bytes'] >> 20} to {row['most_resident_bytes'] >> 20} MiB resident"
            )
    record["load_average_after"] = load_average()
    if asked.json is not None:
        asked.json.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
