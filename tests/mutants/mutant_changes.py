"""Mutants: one-line changes of the source, each of which a test should notice. Pure: reads text, runs nothing.

[Note: what is changed]
    Comparisons, arithmetic, `and` / `or`, `not`, numbers and truth values (defaults and keywords included), `min` /
    `max`, `any` / `all`, conditions, returned values, statements and copies that are taken out, `[::-1]`, `with`
    blocks, `break`. Left alone: text, so also messages, `__repr__` and what is logged; annotations and decorators,
    which decide nothing at run time; assertions, which only repeat what holds anyway; `strict=` of zip, and code for
    type checkers.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

SUBJECTS = (
    "core",
    "ops",
    "comm",
    "shard",
    "hold",
    "strategies",
    "pipelining",
    "parallel_model.py",
    "train/checkpoint",
    *(f"train/{name}.py" for name in ("data/windows", "step", "state")),
)
"""What is changed, below `src/rotorch`."""

_COMPARISONS = {
    ast.Lt: ("<", ("<=", ">=")),
    ast.LtE: ("<=", ("<", ">")),
    ast.Gt: (">", (">=", "<=")),
    ast.GtE: (">=", (">", "<")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
}
_ARITHMETIC = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"),
    ast.Mod: ("%", "//"),
    ast.Pow: ("**", "*"),
    ast.BitOr: ("|", "&"),
    ast.BitAnd: ("&", "|"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
_FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list", "reversed": "iter"}
_COPIES = {"clone", "detach", "contiguous", "copy"}
_TEXT_METHODS = {"__repr__", "__str__", "__format__", "extra_repr"}
_TELLING = re.compile(r"^(print|warnings\.warn|.*\b(logger|log|logging|console)\.\w+)$")


@dataclass(frozen=True)
class Mutant:
    """One changed line.

    Attributes:
        path: of the file, below the root of the repository.
        line: its number.
        before: the line, without indentation.
        after: the line as it is changed.
        column: where the change begins, which tells equal changes of one line apart.
        first: the first line whose execution may show the change.
        last: the last of these lines.
    """

    path: str
    line: int
    before: str
    after: str
    column: int
    first: int
    last: int

    @property
    def key(self) -> str:
        """Names the change, wherever the line now stands in its file."""
        return f"{self.path}|{self.before}|{self.after}"

    @property
    def package(self) -> str:
        """The part of the source that it belongs to."""
        return self.path.split("/")[2].removesuffix(".py")

    def applied_to(self, text: str) -> str:
        """The file's text with the change."""
        lines = text.splitlines(keepends=True)
        old = lines[self.line - 1]
        lines[self.line - 1] = old[: len(old) - len(old.lstrip())] + self.after + "\n"
        return "".join(lines)


@dataclass(frozen=True)
class OnceSurvived:
    """A change that all tests once let live, and a test that notices it.

    Attributes:
        mistake: what goes wrong with it.
        path: of the file, below the root of the repository.
        before: the line, without indentation; it is there once.
        after: the line as it is changed.
        test: the id of a test that fails with the change, and passes without.
    """

    mistake: str
    path: str
    before: str
    after: str
    test: str

    def mutant_of(self, text: str) -> Mutant:
        """The change of the file's text.

        Raises:
            ValueError: if the line is missing, or there more than once.
        """
        lines = [number for number, line in enumerate(text.splitlines(), 1) if line.strip() == self.before]
        if len(lines) != 1:
            raise ValueError(f"{self.path}: {len(lines)} lines are {self.before!r}")
        return Mutant(self.path, lines[0], self.before, self.after, 0, lines[0], lines[0])


def subjects(root: Path) -> list[Path]:
    """The files that are changed, below the root of a repository."""
    package = root / "src" / "rotorch"
    found = [package / name for name in SUBJECTS]
    files = [path for one in found for path in ([one] if one.suffix else sorted(one.rglob("*.py")))]
    return [path for path in files if path.name != "__init__.py" or path.parent.name == "strategies"]


def sample(texts: Mapping[str, str], *, count: int, seed: int) -> list[Mutant]:
    """Draws mutants, one per line at most; a change of the source elsewhere leaves the others as they are.

    Args:
        texts: of the files that are changed, by path below the root of the repository.
        count: how many to draw.
        seed: which.
    """
    drawn: dict[tuple[str, int], Mutant] = {}
    taken: set[str] = set()
    everything = (mutant for path, text in texts.items() for mutant in mutants_of(text, path=path))
    for mutant in sorted(everything, key=lambda m: hashlib.blake2b(f"{seed}|{m.key}|{m.column}".encode()).digest()):
        if len(drawn) == count:
            break
        if (mutant.path, mutant.line) not in drawn and mutant.key not in taken and _is_python(mutant, texts):
            drawn[mutant.path, mutant.line] = mutant
            taken.add(mutant.key)
    return list(drawn.values())


def _is_python(mutant: Mutant, texts: Mapping[str, str]) -> bool:
    try:
        ast.parse(mutant.applied_to(texts[mutant.path]))
    except SyntaxError:  # a line of what goes on over several
        return False
    return True


def mutants_of(text: str, *, path: str) -> list[Mutant]:
    """All mutants of a file, a few of which Python does not accept."""
    lines = text.splitlines()
    found: dict[tuple[int, str], Mutant] = {}
    for change in _walk(ast.parse(text), lines=lines, span=(1, len(lines)), function=None):
        old = lines[change.line - 1]
        new = old[: change.start] + change.text + old[change.end :]
        mutant = Mutant(path, change.line, old.strip(), new.strip(), change.start, *change.span)
        if new.strip() == old.strip() or (change.line, new) in found:
            continue
        found[change.line, new] = mutant
    return list(found.values())


@dataclass(frozen=True)
class _Change:
    line: int
    start: int
    end: int
    text: str
    span: tuple[int, int]


def _walk(
    node: ast.AST, *, lines: list[str], span: tuple[int, int], function: tuple[int, int] | None
) -> Iterator[_Change]:
    """Changes of a node and of all below it, with the lines that a test must reach to notice them."""
    if _is_left_alone(node):
        return
    if isinstance(node, ast.stmt):
        span = function or span  # what runs at import shows wherever the function, or the file, is used
        if function is not None:
            body = getattr(node, "body", None)
            span = (node.lineno, max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno)
    for start, end, text in _changes(node, lines):
        if start[0] == end[0]:
            yield _Change(start[0], start[1], end[1], text, span)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        whole = (node.lineno, node.end_lineno or node.lineno)
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            yield from _walk(default, lines=lines, span=whole, function=function)
        for child in node.body:
            yield from _walk(child, lines=lines, span=whole, function=whole)
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_comment"):
            continue
        inner = None if isinstance(node, ast.ClassDef) else function
        outer = (node.lineno, node.end_lineno or node.lineno) if isinstance(node, ast.ClassDef) else span
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _walk(child, lines=lines, span=outer, function=inner)


def _is_left_alone(node: ast.AST) -> bool:
    match node:
        case ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
            return True
        case ast.FunctionDef(name=name):
            return name in _TEXT_METHODS
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.Call(func=function):
            return bool(_TELLING.match(ast.unparse(function))) or ast.unparse(function).endswith(("Error", "Failure"))
        case ast.keyword(arg="strict"):
            return True
        case ast.Assign(targets=[ast.Name(id="__all__" | "__slots__")]):
            return True
    return False


_Place = tuple[int, int]


def _changes(node: ast.AST, lines: list[str]) -> Iterator[tuple[_Place, _Place, str]]:
    """Replacements of a node or of a part of it: from, to, the new text."""

    def source(part: ast.expr) -> str:
        return lines[part.lineno - 1][_column(part.lineno, part.col_offset) : _end(part)[1]]

    def _column(line: int, offset: int) -> int:
        return len(lines[line - 1].encode()[:offset].decode())

    def _start(part: ast.expr | ast.stmt) -> _Place:
        return part.lineno, _column(part.lineno, part.col_offset)

    def _end(part: ast.expr | ast.stmt) -> _Place:
        return part.end_lineno or 0, _column(part.end_lineno or 0, part.end_col_offset or 0)

    def between(left: ast.expr, right: ast.expr, old: str, new: str) -> Iterator[tuple[_Place, _Place, str]]:
        (line, begin), (other, end) = _end(left), _start(right)
        if line == other and old in (gap := lines[line - 1][begin:end]):
            at = begin + gap.index(old)
            yield (line, at), (line, at + len(old)), new

    def whole(part: ast.expr | ast.stmt, new: str) -> Iterator[tuple[_Place, _Place, str]]:
        if part.lineno == part.end_lineno:
            yield _start(part), _end(part), new

    match node:
        case ast.Compare(left=left, ops=operators, comparators=rights):
            for a, operator, b in zip([left, *rights], operators, rights, strict=False):
                old, news = _COMPARISONS[type(operator)]
                for new in news:
                    yield from between(a, b, old, new)
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _ARITHMETIC:
            if not any(_is_text(part) or _is_none(part) for part in (left, right)):
                yield from between(left, right, *_ARITHMETIC[type(operator)])
        case ast.AugAssign(target=target, op=operator, value=value) if type(operator) in _ARITHMETIC:
            if not _is_text(value):
                old, new = _ARITHMETIC[type(operator)]
                yield from between(target, value, f"{old}=", f"{new}=")
            yield from whole(node, "pass")
        case ast.BoolOp(op=operator, values=values):
            old, new = ("and", "or") if isinstance(operator, ast.And) else ("or", "and")
            for a, b in itertools.pairwise(values):
                yield from between(a, b, old, new)
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand) if operand.lineno == operand.end_lineno:
            yield from whole(node, source(operand))
        case ast.Constant(value=bool(value)):
            yield from whole(node, str(not value))
        case ast.Constant(value=int(value)):
            yield from whole(node, str(value + 1))
        case ast.Constant(value=float(value)):
            yield from whole(node, repr(value * 2 if value else 1.0))
        case ast.If(test=test) | ast.IfExp(test=test) if test.lineno == test.end_lineno:
            yield from whole(test, f"(not ({source(test)}))")
        case ast.comprehension(ifs=conditions):
            for test in conditions:
                if test.lineno == test.end_lineno:
                    yield from whole(test, f"(not ({source(test)}))")
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.Delete() | ast.Raise(exc=ast.Call()):
            yield from whole(node, "pass")
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield from whole(node, "pass")
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield from whole(value, "None")
        case ast.Continue():
            yield from whole(node, "break")
        case ast.Break():
            yield from whole(node, "continue")
        case ast.Call(func=ast.Name(id=name) as called) if name in _FUNCTIONS:
            yield from whole(called, _FUNCTIONS[name])
        case ast.Call(func=ast.Attribute(value=value, attr=name), args=[]) if name in _COPIES:
            if value.lineno == node.lineno:
                yield from whole(node, source(value))
        case ast.Subscript(value=value, slice=ast.Slice(lower=None, upper=None, step=ast.UnaryOp())):
            yield from whole(node, source(value))
        case ast.With(items=[ast.withitem(optional_vars=None, context_expr=entered)]):
            line = node.lineno
            if entered.end_lineno == line and lines[line - 1].rstrip().endswith(":"):
                yield _start(node), (line, len(lines[line - 1].rstrip())), "if True:"


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
