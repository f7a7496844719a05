"""Completion of overrides in the shell: `optimizer.na` becomes `optimizer.name=adamw`, `optimizer.name=sgd`, ..."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, get_args, get_origin

if TYPE_CHECKING:
    from pydantic import BaseModel


def completions(incomplete: str) -> list[str]:
    """Words that may stand in place of the one that the user has begun: keys of a run, and their values.

    Several keys are completed up to their `=`; of a single one the values are shown, or its default.
    """
    return words(incomplete, environment=os.environ)


def words(incomplete: str, *, environment: Mapping[str, str]) -> list[str]:
    """The words for `completions`.

    Args:
        incomplete: the beginning of a word.
        environment: of the process, as the shell has called it.
    """
    from rotorch.run_config import RunConfig  # here: it takes a third of a second, and most calls complete nothing

    known = key_values(RunConfig)
    key = _key_before(environment)
    if key is not None:  # for bash, `=` ends a word
        return [value for value in known.get(key, ()) if value.startswith(incomplete.lstrip("="))]
    begun, equals, value = incomplete.partition("=")
    if equals:
        return [f"{begun}={word}" for word in known.get(begun, ()) if word.startswith(value)]
    found = [name for name in known if name.startswith(begun)]
    sections = dict.fromkeys(f"{name.partition('.')[0]}." for name in found)
    if len(sections) > 1:
        return list(sections)
    if len(found) == 1:
        return [f"{found[0]}={word}" for word in known[found[0]] or ("",)]
    return [f"{name}=" for name in found]


def _key_before(environment: Mapping[str, str]) -> str | None:
    """The key before the `=` at which bash has cut a word in two."""
    if environment.get("_ROTORCH_COMPLETE") != "complete_bash":
        return None
    parts, number = environment.get("COMP_WORDS", "").split(), environment.get("COMP_CWORD", "")
    if not number.isdecimal():
        return None
    at = int(number)
    if at < len(parts) and parts[at] == "=":
        return parts[at - 1]
    return parts[at - 2] if at >= 2 and parts[at - 1 : at] == ["="] else None


def key_values(model: type[BaseModel], *, prefix: str = "") -> dict[str, tuple[str, ...]]:
    """All keys that an override may set, with the words that each takes; its default where it takes any."""
    from pydantic import BaseModel

    found: dict[str, tuple[str, ...]] = {}
    for name, field in model.model_fields.items():
        annotations = (field.annotation, *get_args(field.annotation))
        sections = [t for t in annotations if isinstance(t, type) and issubclass(t, BaseModel)]
        if sections:
            found |= key_values(sections[0], prefix=f"{prefix}{name}.") if Ellipsis not in annotations else {}
            continue
        given = [word for t in annotations if get_origin(t) is Literal for word in get_args(t)]
        given = [True, False] if field.annotation is bool else given
        words = tuple(str(word).lower() if isinstance(word, bool) else str(word) for word in given)
        if not words and isinstance(field.default, int | float | str) and field.default != "":
            words = (str(field.default),)
        found[f"{prefix}{name}"] = words
    return found
