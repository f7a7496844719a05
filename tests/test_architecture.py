"""The rules of the code base, held by reading it: layers, names, sizes, and who may touch the edges of torch."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "rotorch"

# A module belongs to the first entry that its dotted name begins with. Imports never point to a higher layer.
LAYERS = {
    "core": 0,
    "pipelining": 0.5,
    "strategies.*.apply": 6,
    "strategies": 1,  # the dict of all, each plan.py, and pure schedules
    "planner": 2,
    "run_config": 2,
    "run_data": 2,
    "process.parent_death": 2,
    "mesh": 3,
    "source": 2,
    "report": 2,
    "process": 3,
    "comm": 3,
    "_torch_private": 3,
    "shard": 4,
    "models": 4,
    "ops": 5,
    "parallel_model": 5,
    "hold": 5,
    "optim": 5,
    "drop_in": 5.5,
    "parallelize": 6,
    "traced": 6,
    "testing": 6.5,  # public, for tests and `rotorch verify`; IMPORTED_ONLY_BY keeps layer 7 out of it
    "train": 7,
    "bench": 7,
    "accelerate": 7.25,
    "lightning": 7.25,
    "hf": 7.5,
    "cli": 8,
    "__main__": 8,
}
TOP = 8  # rotorch/__init__.py, whose names load on first use
PURE = 2  # up to this layer nothing imports torch, or what would import it
HEAVY = {"torch", "transformers", "datasets", "safetensors", "tokenizers", "tensorboard"}
IMPORTED_ONLY_BY = {"testing": {"testing", "cli"}}
OPERATIONS = re.compile(
    r"torch\.distributed\.(distributed_c10d\.)?(all_reduce|all_gather|all_to_all|reduce|broadcast|gather|scatter"
    r"|i?send|i?recv|batch_isend_irecv|P2POp|barrier|monitored_barrier|nn\b|_functional_collectives)"
)
STATE_OF_A_PROCESS = {
    "process.forking": "a fork must know of the process before it, and only the process itself can tell it",
    "comm.shared_memory_reduce": "memory that ranks share goes with a process group, which is torch's",
    "models.trial.slices": "a trial of a kind of model is made once per process",
    "models.trial.features": "the same",
    "models.trial.sequence": "the same",
    "models.trial.shared_sequence": "the same",
}
"""Modules whose functions change what the module itself holds, and why they may."""
UNDONE = {"drop_in.changes", "drop_in.origin"}  # they give plain modules back
ONLY_THERE = {
    r"torch\.distributed\.tensor\.DTensor\.from_local$": {"shard.sharded_weight", "bench.peers.tensor_parallel"},
    r"rotorch\.shard\.sites\.find_sites$": {"parallelize", "shard.at_rest", "models", "bench", "traced", *UNDONE},
    r"rotorch\.shard\.sharded_weight\.dtensor_at_rest$": {"hold.sharded_weights"},
    r"rotorch\.shard\.sharded_weight\.EarlierGradient$": {"strategies.ddp.apply", "shard.gradient_hooks"},
    r"rotorch\.models\.trial\.sums\.(adds_up|is_linear_in_rows)$": {"models.trial.slices", "ops.partial_module"},
    r"rotorch\.models\.trial\.sums\.passes_biases_on$": {"ops.partial_module"},
    # In a slice, in the whole that all ranks read, and where calls of it are told from others.
    r"torch\.nn\.functional\.embedding$": {"ops.ids_in_slice", "ops.side_by_side", "ops.weight_proxy", "models.trial"},
}
"""By what is used: the modules that use it. What they make is passed on, so that each of these is done in one way."""
OLD_WORDS = re.compile(
    r"_*((come_home|guests_came|lend|take_back|add_late|mark_on|take_memory|give_memory_back|hands_on|remade|made_whole"
    r"|unhooked|own_store|message_threads|place_side_by_side|take_own|companions|landing|deaths|orphans)$"
    r"|(Twin|HeldWeight|Piece|StandIn|(Rotating|Cut|Plane|Block)Weight|Line|Meeting|Whereabouts|Turns)s?$"
    r"|\w*(Place|Holding)$)"
)
"""Names that the glossary in docs/architecture.md has other words for."""
BAD_FILES = {"utils", "util", "helpers", "helper", "common", "misc", "base"}
BAD_CLASSES = re.compile(r"(Engine|Manager|Context|Factory|Registry)$")
MAX_LINES = 600
RIDDLES = re.compile(r"(What(ever)?|Whether|Which(ever)?|How|Who(ever|se)?|Where|When|That|Those)\b")


def entry_of(module: str) -> str | None:
    """The entry of LAYERS that a module (dotted, below rotorch) belongs to."""
    parts = module.split(".")
    for entry in LAYERS:
        want = entry.split(".")
        if len(want) <= len(parts) and all(w in ("*", p) for w, p in zip(want, parts, strict=False)):
            return entry
    return None


def layer_of(module: str) -> float:
    entry = entry_of(module)
    return TOP if entry is None else LAYERS[entry]


def uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every dotted name that is imported, or reached as an attribute of something imported, at any depth."""
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
                first = alias.name.split(".")[0]
                bound[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            head, _, rest = ast.unparse(node).partition(".")
            if head in bound:
                yield node.lineno, f"{bound[head]}.{rest}"


def internal(tree: ast.Module) -> Iterator[tuple[int, str]]:
    return ((line, name.removeprefix("rotorch.")) for line, name in uses(tree) if name.split(".")[0] == "rotorch")


# ---- the rules: each yields (line, what is wrong) ----------------------------------------------------------------


def imports_point_down(module: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    if module and entry_of(module) is None:
        yield 1, "has no layer: add it to LAYERS"
    for line, name in internal(tree):
        if layer_of(name) > layer_of(module):
            yield line, f"imports {name} of layer {layer_of(name)} from layer {layer_of(module)}"
        if entry_of(module) not in IMPORTED_ONLY_BY.get(entry_of(name) or "", {entry_of(module)}):
            yield line, f"imports {name}, which is for {IMPORTED_ONLY_BY[entry_of(name) or '']} only"


def imports_are_absolute(module: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield node.lineno, "relative import: write rotorch. ..."


def strategies_stay_apart(module: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    match module.split("."):
        case ["strategies", kind, *_]:
            for line, name in internal(tree):
                if f"{name}.".startswith("strategies.") and not f"{name}.".startswith(f"strategies.{kind}."):
                    yield line, f"strategy {kind} imports {name}"


def pure_layers_import_no_torch(module: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    if module and layer_of(module) <= PURE:
        for line, name in uses(tree):
            if name.split(".")[0] in HEAVY:
                yield line, f"imports {name} in a torch-free layer"


def only_comm_communicates(module: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    if entry_of(module) != "comm":
        for line, name in uses(tree):
            if OPERATIONS.match(name):
                yield line, f"uses {name} outside comm/"


def only_torch_private_is_private(module: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    if module != "_torch_private":
        for line, name in uses(tree):
            if re.match(r"torch\.(\w+\.)*_(?!_)", name):
                yield line, f"uses {name} outside _torch_private.py"


def classes_say_what_they_are(module: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and BAD_CLASSES.search(node.name):
            yield node.lineno, f"class {node.name}: name what it is or does"


def modules_hold_no_state(module: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Importing a module runs nothing, and what it holds stays as it is."""
    if module in STATE_OF_A_PROCESS:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield node.lineno, f"global {', '.join(node.names)}"
    for node in tree.body:
        match node:
            case ast.Expr(value=ast.Call()):
                yield node.lineno, f"importing it calls {ast.unparse(node.value.func)}"
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=value)
            ):
                if name.strip("_").islower() and name != "__all__" and is_container(value):
                    yield node.lineno, f"{name} is filled later: keep it in an object"


def is_container(value: ast.expr | None) -> bool:
    """True if an expression makes a dict, list or set, of whatever class."""
    match value:
        case ast.Dict() | ast.List() | ast.Set():
            return True
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name.lower().endswith(("dict", "dictionary", "list", "set", "deque", "counter"))
    return False


def old_words_stay_away(module: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and OLD_WORDS.match(node.name):
            yield node.lineno, f"{node.name}: see the words in docs/architecture.md"


def docstrings_open_with_a_subject(module: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        documented = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module)
        if documented and RIDDLES.match(said := ast.get_docstring(node) or ""):
            yield node.body[0].lineno, f"open with a noun, a verb or 'True if', not with {said.split()[0]!r}"


def weights_are_held_in_one_way(module: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    for line, name in uses(tree):
        for pattern, modules in ONLY_THERE.items():
            if re.match(pattern, name) and not any(f"{module}.".startswith(f"{there}.") for there in modules):
                yield line, f"uses {name}, which is for {', '.join(sorted(modules))} only: ask these for it"


def file_problems(path: Path, text: str) -> Iterator[str]:
    if bad := BAD_FILES & {Path(part).stem for part in path.parts}:
        yield f"{path}: nothing is called {bad.pop()!r}"
    if (num_lines := text.count("\n")) > MAX_LINES:
        yield f"{path}: {num_lines} lines, more than {MAX_LINES}"


def order_of_parts(modules: dict[str, ast.Module]) -> list[str]:
    """The parts of the package, imported ones first. Raises CycleError where two parts need each other."""
    graph: dict[str, set[str]] = {}
    for module, tree in modules.items():
        if part := entry_of(module):
            imported = {entry_of(name) for _, name in internal(tree)}
            graph.setdefault(part, set()).update(i for i in imported if i not in (part, None))
    return list(TopologicalSorter(graph).static_order())


def order_of_files(modules: dict[str, ast.Module]) -> list[str]:
    """The files of the package, imported ones first. Raises CycleError where files need each other, for types too."""

    def file_of(name: str) -> str | None:
        parts = name.split(".")
        return next((known for k in range(len(parts), 0, -1) if (known := ".".join(parts[:k])) in modules), None)

    graph = {
        module: {other for _, name in internal(tree) if (other := file_of(name)) not in (module, None)}
        for module, tree in modules.items()
    }
    return list(TopologicalSorter(graph).static_order())


# ---- the code base keeps them ------------------------------------------------------------------------------------


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(p): ast.parse(p.read_text("utf-8"), p) for p in sorted(PACKAGE.rglob("*.py"))}
RULES = [
    imports_point_down,
    imports_are_absolute,
    strategies_stay_apart,
    pure_layers_import_no_torch,
    only_comm_communicates,
    only_torch_private_is_private,
    classes_say_what_they_are,
    modules_hold_no_state,
    weights_are_held_in_one_way,
    docstrings_open_with_a_subject,
    old_words_stay_away,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds(rule):
    found = {f"rotorch.{m}:{line}: {what}" for m, tree in MODULES.items() for line, what in rule(m, tree)}
    assert not found, "\n" + "\n".join(sorted(found))


def test_parts_form_no_cycle():
    assert "core" in order_of_parts(MODULES)


def test_files_form_no_cycle():
    assert set(order_of_files(MODULES)) == set(MODULES)


def test_layers_in_contributing_are_those_of_the_code():
    block = re.search(r"## The layers.*?```\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.DOTALL)
    assert block is not None
    drawn = {}
    for line in block[1].splitlines():
        if found := re.match(r"(\d\S*)\s+(.*)", line):
            for part in found[2].split():
                drawn[part.rstrip("/").removesuffix(".py").replace("/", ".").replace("<kind>", "*")] = float(found[1])
    assert drawn == {part: layer for part, layer in LAYERS.items() if part != "__main__"}


def test_the_picture_of_layers_has_every_part_below_those_that_import_it():
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    block = re.search(r"## The layers.*?```\n(.*?)```", page, re.DOTALL)
    assert block is not None
    lines = [re.split(r"\s{2,}", line) for line in block[1].splitlines() if not line.startswith("---")]
    rows = [[name for name in line if "/" in name or name.endswith(".py")] for line in lines]
    rows = [[name.rstrip("/").removesuffix(".py").replace("/", ".") for name in row if " " not in name] for row in rows]
    drawn = [[name.replace("<kind>", "*").removesuffix(".__init__") for name in row] for row in rows]
    layers = [[layer_of(name.replace("*", "rtp")) for name in row] for row in drawn]
    assert layers == sorted(layers, reverse=True) and all(min(a) >= max(b) for a, b in pairwise(layers))
    assert set(LAYERS) - {"__main__"} <= {name for row in drawn for name in row}


def test_the_glossary_is_short_and_names_what_is_there():
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    block = re.search(r"## Words\n(.*?)\n## ", page, re.DOTALL)
    assert block is not None and block[1].count("\n") <= 40
    source = "".join(path.read_text("utf-8") for path in PACKAGE.rglob("*.py"))
    assert [word for word in re.findall(r"`(\w+)`", block[1]) if not re.search(rf"\b{word}\b", source)] == []


def test_the_tree_in_the_page_has_every_part_of_the_package_and_nothing_else():
    block = re.search(r"```\nsrc/rotorch/\n(.*?)\n\S", (ROOT / "docs" / "repository.md").read_text("utf-8"), re.DOTALL)
    assert block is not None
    drawn = {part for line in block[1].splitlines() for part in re.split(r"\s{3,}", line.strip())[0].split()}
    there = {p.name + "/" * p.is_dir() for p in PACKAGE.iterdir() if not p.name.startswith("__")}
    assert drawn == there


def test_files_are_short_and_well_named():
    paths = [p for folder in ("src", "tests", "examples", "benchmarks") for p in (ROOT / folder).rglob("*.py")]
    found = [problem for p in paths for problem in file_problems(p.relative_to(ROOT), p.read_text("utf-8"))]
    assert not found, "\n" + "\n".join(found)


def test_docstrings_beside_the_package_open_with_a_subject_too():
    paths = [p for folder in ("tests", "examples", "benchmarks") for p in (ROOT / folder).rglob("*.py")]
    found = [
        f"{p.relative_to(ROOT)}:{line}: {what}"
        for p in paths
        for line, what in docstrings_open_with_a_subject("", ast.parse(p.read_text("utf-8")))
    ]
    assert not found, "\n" + "\n".join(found)


def test_pure_layers_load_without_torch():
    pure = ["rotorch", *(f"rotorch.{m}" for m in MODULES if m and layer_of(m) <= PURE)]
    code = f"import sys, {', '.join(pure)}; print(*sorted({HEAVY} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


# ---- and each rule bites: the first source breaks it, the second does not ---------------------------------------

BITES = [
    (imports_point_down, "core.spec", "from rotorch.mesh import x", "from rotorch.core.layout import x"),
    (imports_point_down, "ops.rotate", "def f():\n import rotorch.train.loop", "def f():\n import rotorch.comm.ring"),
    (imports_point_down, "shard.cut", "from rotorch import parallelize", "from rotorch import mesh"),
    (imports_point_down, "strategies", "from rotorch.strategies.rtp import apply", "import rotorch.strategies.rtp"),
    (imports_point_down, "parallelize", "import rotorch.testing.fake", "import rotorch.strategies.rtp.apply"),
    (imports_point_down, "train.loop", "import rotorch.testing.fake", "import rotorch.parallelize"),
    (imports_point_down, "train.loop", "import rotorch as r; r.DDP", "import rotorch.core as r; r.spec"),
    (imports_are_absolute, "core.spec", "from . import layout", "from rotorch.core import layout"),
    (strategies_stay_apart, "strategies.tsp.apply", "import rotorch.strategies.rtp.plan", "import rotorch.ops.rotate"),
    (strategies_stay_apart, "strategies.ddp.plan", "from rotorch.strategies import x", "from rotorch.core import x"),
    (pure_layers_import_no_torch, "core.spec", "def f():\n import torch", "import pydantic"),
    (only_comm_communicates, "ops.loss", "import torch.distributed as d; d.all_reduce(x)", "x.gather(1, i)"),
    (only_comm_communicates, "train.run", "from torch.distributed import recv", "from torch.distributed import Work"),
    (only_comm_communicates, "mesh", "import torch; torch.distributed.isend(x, 1)", "import torch.distributed.tensor"),
    (only_torch_private_is_private, "comm.ring", "import torch; torch._C.x", "import torch; torch.__version__"),
    (only_torch_private_is_private, "testing.fake", "from torch.utils._pytree import x", "from rotorch._x import y"),
    (classes_say_what_they_are, "comm.ring", "class RingManager: ...", "class ManagedRing: ..."),
    (modules_hold_no_state, "comm.ring", "def f():\n global x\n x = 1", "def f():\n x = 1"),
    (modules_hold_no_state, "comm.ring", "import os; os.register_at_fork()", "import os; x = os.name"),
    (modules_hold_no_state, "models.hf", "_known: dict[str, int] = {}", "NAMES = {}"),
    (modules_hold_no_state, "models.hf", "_known = WeakKeyDictionary()", "_log = logging.getLogger(__name__)"),
    (
        weights_are_held_in_one_way,
        "strategies.rtp.apply",
        "from torch.distributed.tensor import DTensor; DTensor.from_local(x, mesh)",
        "from torch.distributed.tensor import DTensor; DTensor.to_local(x)",
    ),
    (
        weights_are_held_in_one_way,
        "hold.grid",
        "from rotorch.shard.sites import find_sites",
        "from rotorch.shard.sites import Site",
    ),
    (
        docstrings_open_with_a_subject,
        "train.loop",
        "class A:\n def f(self):\n  'Whether it ends.'",
        "class A:\n def f(self):\n  'True if it ends, whatever happens.'",
    ),
    (docstrings_open_with_a_subject, "mesh", "'How ranks are numbered.'", "'Numbers of ranks.'"),
    (old_words_stay_away, "hold.pipeline", "def come_home(): ...", "def restore_owners(): ..."),
    (old_words_stay_away, "core.grid", "class GridPlace: ...", "class GridCoordinate: ..."),
    (modules_hold_no_state, "models.hf", "known = {}", 'STATE_OF_A_PROCESS = {"probe": "x"}'),
]


@pytest.mark.parametrize(("rule", "module", "bad", "good"), BITES)
def test_rule_bites(rule, module, bad, good):
    assert list(rule(module, ast.parse(bad)))
    assert not list(rule(module, ast.parse(good)))


def test_every_rule_is_shown_to_bite():
    assert {rule for rule, *_ in BITES} == set(RULES)


def test_an_unknown_file_needs_a_layer():
    assert list(imports_point_down("newcomer", ast.parse("")))


def test_two_parts_that_need_each_other_are_a_cycle():
    there, back = ast.parse("import rotorch.bench.table"), ast.parse("import rotorch.train.loop")
    with pytest.raises(CycleError):
        order_of_parts({"train.loop": there, "bench.table": back})


def test_two_files_that_need_each_other_are_a_cycle_also_for_types_alone():
    there, back = ast.parse("if TYPE_CHECKING:\n from rotorch.core.b import B"), ast.parse("from rotorch.core import a")
    with pytest.raises(CycleError):
        order_of_files({"core.a": there, "core.b": back})
    assert order_of_files({"core.a": there, "core.b": ast.parse("")}) == ["core.b", "core.a"]


@pytest.mark.parametrize("path", ["src/rotorch/utils.py", "src/rotorch/common/ring.py", "tests/helpers.py"])
def test_bad_file_names_are_found(path):
    assert list(file_problems(Path(path), ""))


def test_long_files_are_found():
    assert list(file_problems(Path("x.py"), "\n" * (MAX_LINES + 1)))
    assert not list(file_problems(Path("x.py"), "\n" * MAX_LINES))


def test_files_that_the_documentation_names_are_there():
    there = [
        f"/{path.relative_to(ROOT)}" for part in ("src", "tests", "benchmarks") for path in (ROOT / part).rglob("*")
    ]
    named = re.findall(r"`([\w./]+(?:\.py|/))`", (ROOT / "docs" / "architecture.md").read_text())
    assert len(named) > 100
    assert [n for n in named if not any(path.endswith(f"/{n.rstrip('/')}") for path in there)] == []
