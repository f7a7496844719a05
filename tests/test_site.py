"""The documentation as a site: every page is in the navigation, and every link between files leads somewhere."""

import re
import unicodedata
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]


def script(name: str) -> ModuleType:
    spec = spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site() -> ModuleType:
    return script("make_site")


def in_navigation(part: Any) -> Iterator[str]:
    if isinstance(part, str):
        yield part
    for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from in_navigation(inner)


def anchors_of(page: Path) -> set[str]:
    """Anchors of a page's headings, as Python-Markdown makes them."""
    found: set[str] = set()
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        words = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
        words = re.sub(r"[^\w\s-]", "", words).strip().lower()
        found.add("#" + re.sub(r"[-\s]+", "-", words))
    return found


def broken(site: ModuleType, page: str) -> list[str]:
    """Links of a page that lead nowhere."""
    found = []
    for target, anchor in site.links((ROOT / page).read_text("utf-8")):
        path = ROOT / site.linked_path(target, page=page)
        leads = path.exists() and (not anchor or path.suffix != ".md" or anchor in anchors_of(path))
        found += [] if leads else [f"{page}: {target}{anchor}"]
    return found


def test_every_page_is_in_the_navigation_once(site: ModuleType) -> None:
    listed = list(in_navigation(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]))
    there = {site.place_on_site(page) for page in [*site.pages_of_docs(), *site.OWN_PAGES]}
    decisions = {page for page in there if re.match(r"decisions/\d", page)}  # their index has them
    assert sorted(listed) == sorted(there - decisions)


def test_every_decision_is_in_the_index(site: ModuleType) -> None:
    index = {target for target, _ in site.links((ROOT / "docs" / "decisions" / "README.md").read_text("utf-8"))}
    assert {p.name for p in (ROOT / "docs" / "decisions").glob("0*.md")} <= index


def test_every_link_leads_somewhere(site: ModuleType) -> None:
    beside = [page for page in site.files_beside_docs() if page.endswith(".md")]
    found = [link for page in [*site.pages_of_docs(), *beside] for link in broken(site, page)]
    assert not found, "\n" + "\n".join(found)


def test_a_link_that_leads_nowhere_is_found(site: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "other.md").write_text("# Other things\n\n```\n# no heading\n```\n")
    (tmp_path / "page.md").write_text("[a](other.md#other-things) [b](gone.md) [c](other.md#no-heading) `[d](no.md)`\n")
    assert broken(site, "page.md") == ["page.md: gone.md", "page.md: other.md#no-heading"]


def test_links_on_the_site(site: ModuleType) -> None:
    def shown(text: str, page: str) -> str:
        return site.for_site(text, page=page)

    assert shown("[a](docs/report.md#x) ![b](docs/rotation.svg)", "README.md") == "[a](report.md#x) ![b](rotation.svg)"
    assert shown("[a](../../README.md)", "docs/tutorials/lora.md") == "[a](../index.md)"
    assert shown("[a](../examples/README.md)", "docs/how_to.md") == "[a](files/examples/README.md)"
    assert shown("[a](../benchmarks/results)", "docs/speed.md") == "[a](files/benchmarks/results/index.md)"
    assert (
        shown("[a](https://x.org/y) `[b](z.md)` [c](#d)", "docs/speed.md") == "[a](https://x.org/y) `[b](z.md)` [c](#d)"
    )


def test_the_pages_of_strategies_are_of_this_code() -> None:
    made = script("make_strategies")
    for path, text in made.pages().items():
        assert path.read_text("utf-8") == text, "run: make reference"
    assert {p for p in made.HERE.iterdir()} == set(made.pages())


def test_the_readme_is_short() -> None:
    """It says what this is; the rest has pages of its own."""
    assert len((ROOT / "README.md").read_text("utf-8")) < 10_500
