"""Writes docs/reference.md and docs/run.schema.json from the code: keys of a run, options of layouts, exit codes.

python docs/make_reference.py        (`make reference`; a test holds the files to the code)
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rotorch import cli
from rotorch.run_config import RunConfig
from rotorch.strategies import COMPOSES, STRATEGIES

HERE = Path(__file__).resolve().parent
PAGE, SCHEMA = HERE / "reference.md", HERE / "run.schema.json"

_ABOUT = """# Reference

Made by `make reference` from the code; do not edit. Editors that know JSON schemas complete and check a run file by
[run.schema.json](run.schema.json): begin it with the line `#:schema path/to/run.schema.json` (Even Better TOML).

## Keys of a run

A key is written under its section, or as `section.key=value` on the command line. One without a default is required."""
_LAYOUTS = """## Options of layouts

Options stand in brackets: `rtp=4[recompute=slice]`. Those without a default are sizes, written before the brackets."""


def page() -> str:
    """The text of docs/reference.md."""
    schema = RunConfig.model_json_schema()
    parts = [_ABOUT, *_sections(schema), _LAYOUTS, *_strategies(), _compositions(), _exit_codes()]
    return "\n\n".join(parts) + "\n"


def schema() -> str:
    """The text of docs/run.schema.json: a run file's JSON schema, with the meaning of every key."""
    found = RunConfig.model_json_schema()
    for cls in _section_classes():
        meanings = meanings_of(cls)
        for key, entry in found["$defs"][cls.__name__]["properties"].items():
            entry.pop("title", None)
            entry["description"] = meanings[key]
    found["$schema"] = "http://json-schema.org/draft-07/schema#"
    return json.dumps(found, indent=1, sort_keys=True) + "\n"


def meanings_of(cls: type) -> dict[str, str]:
    """Names and meanings in the `Attributes` of a class's docstring, and of those that it inherits from."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        text = inspect.cleandoc(vars(base).get("__doc__") or "")
        _, _, attributes = text.partition("Attributes:\n")
        name = ""
        for line in attributes.splitlines():
            if not line.startswith("    "):
                if line.strip():
                    break
                continue
            begins = re.match(r"    (\w+): (.*)", line)
            if begins:
                name = begins[1]
                found[name] = begins[2]
            elif name:
                found[name] += f" {line.strip()}"
    return found


def _section_classes() -> list[type]:
    """Classes of the sections and of the tables in them."""
    found: list[type] = []
    for field in RunConfig.model_fields.values():
        found += _classes_in(field.annotation)
    return found


def _classes_in(annotation: Any) -> list[type]:
    if hasattr(annotation, "model_fields"):
        inner = [cls for field in annotation.model_fields.values() for cls in _classes_in(field.annotation)]
        return [annotation, *inner]
    return [cls for part in getattr(annotation, "__args__", ()) for cls in _classes_in(part)]


def _sections(schema: Mapping[str, Any]) -> Iterator[str]:
    for cls in _section_classes():
        about = _first_line(cls).partition(": ")[2]
        table = _table_of(cls, schema["$defs"][cls.__name__], head="key")
        yield f"### `{_title(cls)}`\n\n{about[:1].upper()}{about[1:]}\n\n{table}"


def _first_line(cls: type) -> str:
    return inspect.cleandoc(cls.__doc__ or "").splitlines()[0]


def _title(cls: type) -> str:
    """A section or table as a run file has it, which its docstring begins with."""
    return _first_line(cls).partition(": ")[0]


def _strategies() -> Iterator[str]:
    for kind, strategy in STRATEGIES.items():
        about = " ".join(inspect.cleandoc(strategy.__doc__ or "").split("\n\n")[0].split())
        yield f"### `{kind}`\n\n{about}\n\n{_table_of(strategy, strategy.model_json_schema(), head='option')}"


def _table_of(cls: type, entries: Mapping[str, Any], *, head: str) -> str:
    """The keys of a class, with what its JSON schema and its docstring say of them."""
    meanings = meanings_of(cls)
    rows = [
        (f"`{key}`", _values(entry), _default(key, entry, entries), meanings[key])
        for key, entry in entries.get("properties", {}).items()
    ]
    return _table((head, "values", "default", "meaning"), rows)


def _compositions() -> str:
    pairs = ", ".join(f"`{outer},{inner}`" for outer, inner in sorted(COMPOSES))
    return f"### Compositions\n\nOutermost first, as in `ddp=2,rtp=4`: {pairs}."


def _exit_codes() -> str:
    text = inspect.cleandoc(cli.__doc__ or "")
    _, _, codes = " ".join(text.split()).partition("Exit codes: ")
    codes, _, _ = codes.partition(" Every command")
    rows = [tuple(re.split(r" (?=[a-z])", code.strip(" ."), maxsplit=1)) for code in codes.split("; ")]
    return f"## Exit codes\n\n{_table(('code', 'meaning'), [(f'`{code}`', meaning) for code, meaning in rows])}"


def _values(entry: Mapping[str, Any]) -> str:
    """The values that an entry of a JSON schema takes, in words."""
    if "anyOf" in entry:
        return " or ".join(_values(part) for part in entry["anyOf"] if part.get("type") != "null")
    if "enum" in entry:
        return ", ".join(f"`{json.dumps(v) if isinstance(v, bool) else v}`" for v in entry["enum"])
    if "$ref" in entry:
        name = entry["$ref"].rpartition("/")[2]
        return f"tables `{next(_title(cls) for cls in _section_classes() if cls.__name__ == name)}`"
    if "const" in entry:
        return f"`{entry['const']}`"
    kind = entry.get("type", "value")
    if kind == "array":
        inner = entry.get("items") or {}
        parts = entry.get("prefixItems")
        return f"list of {len(parts)}: {_values(parts[0])}" if parts else f"list of {_values(inner)}"
    named = {"integer": "whole number", "number": "number", "string": "text", "boolean": "`true`, `false`"}
    return named.get(kind, "table" if kind == "object" else kind) + _bounds(entry)


def _bounds(entry: Mapping[str, Any]) -> str:
    signs = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
    if entry.get("type") == "integer" and entry.get("exclusiveMinimum") == 0:
        entry = {**entry, "exclusiveMinimum": None, "minimum": 1}
    return "".join(f" {sign} {_number(entry[name])}" for name, sign in signs.items() if entry.get(name) is not None)


def _number(value: float) -> str:
    return "2^63 - 1" if value == 2**63 - 1 else f"{value:g}"


def _default(key: str, entry: Mapping[str, Any], entries: Mapping[str, Any]) -> str:
    if key in entries.get("required", ()):
        return ""
    value = entry.get("default")
    if value is None or value in ("", [], {}):
        return "none"
    return f"`{json.dumps(value)}`"


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    if not rows:
        return "No options."
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    SCHEMA.write_text(schema(), "utf-8")
