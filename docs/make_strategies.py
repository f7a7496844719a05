"""Writes docs/strategies/: a page for each strategy, its paper and its layout, from the docstring of its `plan.py`.

python docs/make_strategies.py        (`make reference`; a test holds the pages to the code)
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from rotorch.strategies import STRATEGIES

HERE = Path(__file__).resolve().parent / "strategies"
DRAWN = ("Picture", "Cost")
"""Parts whose columns stand below each other."""


def pages() -> dict[Path, str]:
    """The text of every page."""
    return {HERE / f"{kind}.md": page(kind) for kind in STRATEGIES}


def page(kind: str) -> str:
    """The page of a strategy."""
    doc = inspect.cleandoc(inspect.getmodule(STRATEGIES[kind]).__doc__ or "")
    first, *parts = re.split(r"\n\n(?=\S)", doc)
    made = (
        f"Made by `make reference` from `src/rotorch/strategies/{kind}/plan.py`; do not edit. Its options are in the "
    )
    made += f"[reference](../reference.md#{kind})."
    return "\n\n".join([f"# {kind}", _sentence(first.partition(": ")[2]), made, *map(_part, parts)]) + "\n"


def _part(text: str) -> str:
    head, _, body = text.partition("\n")
    title, _, about = head.partition(" (")
    about = f"*{about.removesuffix(')')}*\n\n" if about else ""
    body = inspect.cleandoc(f"\n{body}")
    if title in DRAWN:
        body = f"```text\n{body}\n```"
    else:
        paragraphs = (" ".join(line.strip() for line in paragraph.splitlines()) for paragraph in body.split("\n\n"))
        body = _with_links("\n\n".join(paragraphs))
    return f"## {title}\n\n{_with_links(about)}{body}"


def _with_links(text: str) -> str:
    return re.sub(r"(arXiv) (\d{4}\.\d{5})", r"[\1 \2](https://arxiv.org/abs/\2)", text)


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    return text[:1].upper() + text[1:]


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    for path, text in pages().items():
        path.write_text(text, "utf-8")
