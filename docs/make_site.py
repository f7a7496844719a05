"""The hook of mkdocs.yml: the README is the first page, and repository files that pages link to come along.

Pages link to each other, and to sources, examples and records, by relative paths, so that they can be read in any
browser of the repository. On the site a file `path` outside docs/ lies in `files/path`. Loads mkdocs only when mkdocs
calls it: a test checks links by the same functions.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OWN_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
"""Pages outside docs/ that are in the navigation, and their places on the site."""

_LINK = re.compile(r"(?<=\])\(([^)\s#]*)(#[^)\s]*)?\)")
_CODE = re.compile(r"(^ *```.*?^ *```|`[^`\n]+`)", re.MULTILINE | re.DOTALL)


def place_on_site(path: str) -> str:
    """The place on the site of a file, by its path in the repository."""
    if path in OWN_PAGES:
        return OWN_PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"files/{path}"


def listed_directories() -> list[str]:
    """Directories that pages link to: their names are listed on a page each."""
    pages = [*(p for p in files_beside_docs() if p.endswith(".md")), *pages_of_docs()]
    found = {linked_path(target, page=p) for p in pages for target, _ in links((ROOT / p).read_text("utf-8"))}
    return sorted(path for path in found if (ROOT / path).is_dir())


def pages_of_docs() -> list[str]:
    """Paths of the pages of docs/."""
    return sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))


def links(text: str) -> Iterator[tuple[str, str]]:
    """Targets and anchors of a page's links, but for addresses elsewhere."""
    for part in _CODE.split(text)[::2]:
        for target, anchor in _LINK.findall(part):
            if "://" not in target and not target.startswith("mailto:"):
                yield target, anchor


def linked_path(target: str, *, page: str) -> str:
    """The path in the repository of a link's target on a page."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target)) if target else page


def files_beside_docs() -> list[str]:
    """Files outside docs/ that pages link to, and those that linked pages link to."""
    found, todo = set(OWN_PAGES), [*OWN_PAGES, *pages_of_docs()]
    while todo:
        page = todo.pop()
        for target, _ in links((ROOT / page).read_text("utf-8")):
            path = linked_path(target, page=page)
            if not path.startswith("docs/") and path not in found and (ROOT / path).is_file():
                found.add(path)
                todo += [path] if path.endswith(".md") else []
    return sorted(found)


def for_site(text: str, *, page: str) -> str:
    """A page of the repository, with links as they are on the site."""
    return "".join(
        part if index % 2 else _LINK.sub(_relinked(page), part) for index, part in enumerate(_CODE.split(text))
    )


def _relinked(page: str) -> Callable[[re.Match[str]], str]:
    here = posixpath.dirname(place_on_site(page))

    def link(found: re.Match[str]) -> str:
        target, anchor = found[1], found[2] or ""
        if not target or "://" in target or target.startswith("mailto:"):
            return found[0]
        path = linked_path(target, page=page)
        if (ROOT / path).is_dir():
            path += "/index.md"
        return f"({posixpath.relpath(place_on_site(path), here or '.')}{anchor})"

    return link


def on_files(files: Any, config: Any) -> Any:
    """Called by mkdocs: adds files from outside docs/, and lists of directories."""
    from mkdocs.structure.files import File

    for path in files_beside_docs():
        place = place_on_site(path)
        files.append(File.generated(config, place, abs_src_path=os.fspath(ROOT / path)))
    for path in listed_directories():
        names = sorted(p.name + "/" * p.is_dir() for p in (ROOT / path).iterdir())
        listing = "\n".join([f"# `{path}`", "", *(f"- `{name}`" for name in names)])
        files.append(File.generated(config, place_on_site(f"{path}/index.md"), content=listing))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by mkdocs: links of a page as they are on the site."""
    place = page.file.src_uri
    path = next((p for p, at in OWN_PAGES.items() if at == place), None)
    path = path or (place.removeprefix("files/") if place.startswith("files/") else f"docs/{place}")
    return for_site(markdown, page=path)
