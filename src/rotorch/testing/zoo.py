"""Every architecture of the installed transformers that has a tensor-parallel plan, tiny, held against one process.

[Note: one model, one child]
    Each model is built and verified in a forked child with limits on time and memory, so that one that hangs or takes
    all memory costs its own row and nothing else. The parent has imported the large packages once.

[Note: resuming]
    The key of a result is the configuration class, the layout, the versions of torch and
    transformers and the text of rotorch's sources. So an interrupted run continues at the first missing result.
"""

from __future__ import annotations

import copy
import hashlib
import json
import multiprocessing
import os
import re
import resource
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from rotorch.core.errors import ConfigError, nearest
from rotorch.core.spec import NO_ORDER, ModelSpec, UnitKind
from rotorch.models.describe import describe
from rotorch.parallelize import load_step_code
from rotorch.pipelining.stage_strategy import StageStrategy
from rotorch.process.forking import forking
from rotorch.source import source_commit
from rotorch.strategies import cuts_context, parse_parallel
from rotorch.testing.subjects import TinySubject, configurations, model_classes, tiny_subject
from rotorch.testing.verify import verify_subject

LAYOUTS = ("rtp=2", "rtp=4", "fsdp=2", "rtp=2[recompute=slice]", "pp=2", "tsp=2")
"""What `make zoo` tries. Over shared memory plain `rtp=2` multiplies with whole weights; `recompute=slice` runs on
slices.
"""

NO_PIPELINE_PLAN = "theirs: its configuration has no pipeline plan"
"""Why many are not held under layouts with stages."""

_SECONDS, _BYTES = 1200.0, 8 << 30
_STEPS = 1
_SHARED_TOKENS = 37
"""Of a row whose tokens ranks share: its four chunks are longer than windows and chunks of tiny models, and uneven."""
_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Outcome:
    """Result of one model under one layout.

    Attributes:
        config: name of the configuration class.
        parallel: the layout.
        ok: exact, or not.
        max_rel_err_grad: over all steps and weights; None if it did not come so far.
        why: if it is not ok: in one line, what is missing, and whose part that is ("ours: ..", "theirs: ..").
        refused: the library says so before anything runs, and `why` is what it says.
        model: name of the model class.
        num_modules: units whose own forward runs on slices.
        num_weights: units of one weight.
        share_cut: of the bytes of all weights, those that are cut.
        seconds: seconds of the trial.
        commit: of the source that it came of; None if that is not known.
    """

    config: str
    parallel: str
    ok: bool
    max_rel_err_grad: float | None = None
    why: str = ""
    refused: bool = False
    model: str = ""
    num_modules: int = 0
    num_weights: int = 0
    share_cut: float = 0.0
    seconds: float = 0.0
    commit: str | None = None

    @property
    def is_wrong(self) -> bool:
        """True if the model ran and its results differ from one process's."""
        return not self.ok and self.max_rel_err_grad is not None


def run_zoo(
    names: Sequence[str] = (),
    *,
    layouts: Sequence[str] = LAYOUTS,
    cache: Path,
    again: bool = False,
    older: bool = False,
    only_known: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> list[Outcome]:
    """Verifies models under layouts, or takes over what `cache` knows of them. Starts ranks; call it from one process.

    Args:
        names: configuration classes; none: all.
        layouts: layouts to try.
        cache: a file of results, one line of JSON each; made if it is missing.
        again: do not take over results.
        older: take over also what other states of the source gave.
        only_known: run nothing; what is not known is left out.
        tell: gets a line of progress after every model.

    Raises:
        ConfigError: a name that transformers has no plan for.
    """
    found = {c.__name__: c for c in configurations()}
    unknown = [name for name in names if name not in found]
    if unknown:
        raise ConfigError(
            f"zoo: no configuration class {unknown[0]!r} with a tensor-parallel plan{nearest(unknown[0], known=found)}"
        )
    wanted = [found[name] for name in names] if names else list(found.values())
    depends_on, commit = _versions(), source_commit()
    kept = {} if again else _read(cache, depends_on=None if older else depends_on)
    if only_known:
        each = ((config_class.__name__, layout) for config_class in wanted for layout in layouts)
        return [kept[key] for key in each if key in kept]
    cache.parent.mkdir(parents=True, exist_ok=True)
    load_step_code(strategy.kind for layout in layouts for strategy in parse_parallel(layout))
    outcomes: list[Outcome] = []
    for number, config_class in enumerate(wanted, start=1):
        mine = [kept.get((config_class.__name__, layout)) for layout in layouts]
        missing = [layout for layout, outcome in zip(layouts, mine, strict=True) if outcome is None]
        found_now = _verify_in_child(config_class, missing) if missing else []
        made = {o.parallel: replace(o, commit=commit) for o in found_now}
        with cache.open("a", encoding="utf-8") as file:
            for outcome in made.values():
                file.write(json.dumps({**asdict(outcome), "depends_on": depends_on}) + "\n")
        rows = [known or made[layout] for layout, known in zip(layouts, mine, strict=True)]
        outcomes += rows
        said = ", ".join(f"{o.parallel} {_in_words(o)}" for o in rows)
        if len({o.why for o in rows}) == 1 and not rows[0].ok:
            said = _in_words(rows[0])
        tell(f"[{number:>3}/{len(wanted)}] {config_class.__name__}: {said}{'' if made else ' (known)'}")
    return outcomes


def _versions() -> str:
    import transformers

    digest = hashlib.blake2b(f"{torch.__version__} {transformers.__version__}".encode(), digest_size=8)
    for path in sorted(_PACKAGE.rglob("*.py")):
        if path.relative_to(_PACKAGE).parts[0] not in ("cli", "bench", "train"):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _read(cache: Path, *, depends_on: str | None) -> dict[tuple[str, str], Outcome]:
    known: dict[tuple[str, str], Outcome] = {}
    for line in cache.read_text("utf-8").splitlines() if cache.is_file() else ():
        try:
            fields = json.loads(line)
            if fields.pop("depends_on") == depends_on or depends_on is None:
                known[fields["config"], fields["parallel"]] = Outcome(**fields)
        except (ValueError, KeyError, TypeError):  # a line that was broken off, or is of an older form
            continue
    return known


# ---- one model, in a child ---------------------------------------------------------------------------------------


def _verify_in_child(config_class: type, layouts: Sequence[str]) -> list[Outcome]:
    """Outcomes of one model, crashes included (see [Note: one model, one child])."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(config_class, layouts, sender))
    with forking():
        child.start()
    sender.close()
    outcomes: list[Outcome] = []
    deadline = time.monotonic() + _SECONDS
    try:
        while len(outcomes) < len(layouts) and receiver.poll(max(0.0, deadline - time.monotonic())):
            outcomes.append(receiver.recv())
        why = f"ours: not done after {_SECONDS:.0f} s"
    except EOFError:
        child.join()
        why = f"ours: its process died (exit code {child.exitcode})"
    finally:
        for process in [*psutil.Process(child.pid).children(recursive=True)] if child.is_alive() else []:
            process.kill()
        child.kill()
        child.join()
        receiver.close()
    done = {o.parallel for o in outcomes}
    return outcomes + [Outcome(config_class.__name__, p, False, why=why) for p in layouts if p not in done]


def _child(config_class: type, layouts: Sequence[str], sender: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    limit = psutil.Process().memory_info().vms + _BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nowhere:  # models warn of much that concerns their real sizes
        os.dup2(nowhere.fileno(), 2)
    for outcome in outcomes_of(config_class, layouts):
        sender.send(outcome)
    os._exit(0)


def outcomes_of(config_class: type, layouts: Iterable[str]) -> Iterable[Outcome]:
    """Verifies a tiny model of a configuration class under each layout, in this process."""
    name = config_class.__name__
    try:
        subject = tiny_subject(config_class)
        spec = describe(subject.build())
    except Exception as error:
        why = _why_not_built(config_class, _line(error))
        yield from (Outcome(name, layout, False, why=why) for layout in layouts)
        return
    for layout in layouts:
        start = time.monotonic()
        tried, of_tried = (subject, spec) if _keeps_router_losses(layout) else _without_router_losses(subject, spec)
        if cuts_context(parse_parallel(layout)):
            tried = replace(tried, num_tokens=_SHARED_TOKENS)
        about: dict[str, Any] = {"model": subject.model_class.__name__}
        if _has_stages(layout) and of_tried.order == NO_ORDER:
            yield Outcome(name, layout, False, why=NO_PIPELINE_PLAN, **about)
            continue
        try:
            about |= _about(of_tried, parallel=layout)
            report = verify_subject(tried, name=name, parallel=layout, steps=_STEPS, timeout_s=_SECONDS / 3)
            error, why = report.max_rel_err_grad, "" if report.ok else f"ours: {report.verdict}"
            yield Outcome(name, layout, report.ok, error, why, seconds=time.monotonic() - start, **about)
        except ConfigError as refusal:
            yield Outcome(name, layout, False, why=_line(refusal, most=480), refused=True, **about)
        except Exception as failure:
            yield Outcome(name, layout, False, why=f"ours: {_line(failure)}", **about)


def _has_stages(layout: str) -> bool:
    return any(isinstance(strategy, StageStrategy) for strategy in parse_parallel(layout))


def _keeps_router_losses(layout: str) -> bool:
    """False where no rank has all that a router's loss is made of: all layers, and all tokens of a sequence."""
    return not _has_stages(layout) and not cuts_context(parse_parallel(layout))


def _without_router_losses(subject: TinySubject, spec: ModelSpec) -> tuple[TinySubject, ModelSpec]:
    if not getattr(subject.config.get_text_config(), "output_router_logits", False):
        return subject, spec
    config = copy.deepcopy(subject.config)
    config.get_text_config().output_router_logits = False
    without = replace(subject, config=config)
    return without, describe(without.build())


def _about(spec: ModelSpec, *, parallel: str) -> dict[str, Any]:
    """Counts the units of a model that are cut, and their share of its bytes, under a layout."""
    for strategy in parse_parallel(parallel):
        spec = strategy.units_of(spec)
    return {
        "num_modules": sum(u.kind is UnitKind.MODULE for u in spec.units),
        "num_weights": sum(u.kind is UnitKind.WEIGHT for u in spec.units),
        "share_cut": sum(u.num_bytes for u in spec.cut_units) / spec.num_bytes,
    }


def _why_not_built(config_class: type, said: str) -> str:
    """Returns whose fault it is that no tiny model runs: theirs if there is no model of it.

    Defaults that make no model say what a rule of `models/trial/tiny.py` would have to fill in.
    """
    classes = model_classes(config_class)
    if not classes:
        return "theirs: transformers has no model for it"
    reasons = []
    for each in classes:
        try:
            with torch.device("meta"):
                each._from_config(config_class())  # type: ignore[attr-defined]
            return f"ours: {said}. It may ask for what only the whole model makes for it"
        except Exception as error:
            reasons.append(f"{each.__name__} of its defaults: {type(error).__name__}: {_line(error)}")
    return f"ours: no rule fills in what its defaults lack: {reasons[0]}"


def _line(error: BaseException, *, most: int = 240) -> str:
    """Message of an error in one line: of a traceback the last."""
    lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith("  ")]
    return " ".join((lines or [type(error).__name__])[-1].split())[:most]


# ---- the table ---------------------------------------------------------------------------------------------------


def table(
    outcomes: Sequence[Outcome], *, layouts: Sequence[str] = LAYOUTS, names: Sequence[str] = (), older: bool = False
) -> str:
    """The outcomes as a page of Markdown.

    Args:
        outcomes: of some models under some layouts.
        layouts: the columns.
        names: configuration classes that have a row, run or not; those of the outcomes have one anyway.
        older: some outcomes may be of other states of the source.
    """
    import transformers

    by_config: dict[str, dict[str, Outcome]] = {name: {} for name in names}
    for outcome in outcomes:
        by_config.setdefault(outcome.config, {})[outcome.parallel] = outcome
    lines = [
        "# Models of transformers under rotorch",
        "",
        "Generated by `make zoo`; do not edit.",
        "",
        f"Every configuration class of transformers {transformers.__version__} that declares a tensor-parallel plan: a",
        "tiny random model of it (few layers, small widths, optional features on), forward and backward in float64",
        "under each layout, against the same model on one process. *Exact* means that loss and gradients of all",
        "weights agree to 1e-10; *refused*, that the library says before anything runs why the layout cannot hold the",
        "model; *no*, that it does not run, or is not exact. The rules that make models tiny",
        "(`models/trial/tiny.py`) name no architecture.",
        "",
        "*Modules* run their own forward on slices of their weights; *weights* go round one by one: embeddings, heads,",
        "and layers of modules that cannot run on slices (found by a trial, `models/trial/slices.py`). *Cut* is what",
        f"these are of all bytes under `{layouts[0]}`: weights that the plan names, and large ones",
        "(`models/rules.py`). The rest is whole on every rank, its gradients summed: norms, biases, small weights,",
        "towers of images or sound that a pass on text does not use. Over shared memory `rtp=2` multiplies with whole",
        "weights where they lie; `recompute=slice` makes it run on slices. *Commit*: of rotorch's source that a row",
        "came of (`+`: changed since), and in brackets the layouts whose results came of another one; `-`: of before",
        "commits were noted.",
        "",
        "| layout | exact | refused | of |",
        "|---|---|---|---|",
        *(
            f"| `{p}` | {sum(o.ok for o in found)} | {sum(o.refused for o in found)} | {len(by_config)} |"
            for p in layouts
            for found in [[row[p] for row in by_config.values() if p in row]]
        ),
        "",
        *_what_was_not_held(by_config, layouts=layouts, older=older),
        f"| configuration | model | {' | '.join(f'`{p}`' for p in layouts)} | modules | weights | cut | commit |",
        f"|---|---|{'---|' * len(layouts)}---|---|---|---|",
    ]
    reasons: list[str] = []
    for name in sorted(by_config):
        row = by_config[name]
        first = next((row[p] for p in layouts if p in row), Outcome(name, "", False))
        cells = [_cell(row.get(p)) for p in layouts]
        about = f"{first.num_modules} | {first.num_weights} | {first.share_cut:.0%}" if first.model else "| |"
        lines.append(f"| {name} | {first.model} | {' | '.join(cells)} | {about} | {_commits(row.values())} |")
        failed = [o for o in row.values() if not o.ok and not o.refused and o.why != NO_PIPELINE_PLAN]
        for why in dict.fromkeys(o.why for o in failed):
            where = ", ".join(f"`{o.parallel}`" for o in failed if o.why == why)
            everywhere = len(row) == len(layouts) and all(o.why == why for o in row.values())
            reasons.append(f"- **{name}**{'' if everywhere else f' ({where})'}: {why}".replace("|", "\\|"))
    lines += _refusals([row[p] for p in layouts for _, row in sorted(by_config.items()) if p in row and row[p].refused])
    if reasons:
        lines += ["", "## Why not", "", *reasons]
    return "\n".join(lines) + "\n"


def _refusals(outcomes: Sequence[Outcome]) -> list[str]:
    """Lines on refusals, those of a layout that say the same of different models together."""
    groups: dict[tuple[str, str], list[str]] = {}
    for o in outcomes:
        why = o.why.removeprefix("ours: ").replace(o.model or o.config, "the model").replace("|", "\\|")
        why = re.sub(r"\b[A-Z]\w+Attention\b", "its attention", why)
        groups.setdefault((o.parallel, why), []).append(o.config)
    of_layout = {p: [(why, names) for (q, why), names in groups.items() if q == p] for p, _ in groups}
    lines = ["", "## Refused", "", "Before anything runs, in one line, whose reason holds for so many configurations:"]
    for layout, found in of_layout.items():
        lines += ["", f"### `{layout}`", ""]
        found.sort(key=lambda group: -len(group[1]))
        lines += [f"- **{len(names)}**: {why}. {', '.join(names)}." for why, names in found]
    return lines if groups else []


def _what_was_not_held(
    by_config: Mapping[str, Mapping[str, Outcome]], *, layouts: Sequence[str], older: bool
) -> list[str]:
    """Lines on models that some columns say nothing of."""
    lines: list[str] = []
    without_routers = [f"`{layout}`" for layout in layouts if not _keeps_router_losses(layout)]
    if without_routers:
        lines.append(
            f"Losses of routers (`output_router_logits`) are off under {' and '.join(without_routers)}, where no rank "
            "has all layers, or all tokens."
        )
    for layout in layouts:
        if cuts_context(parse_parallel(layout)):
            lines.append(
                f"Under `{layout}` ranks share sequences of {_SHARED_TOKENS} tokens, in uneven parts that are longer "
                "than the windows and chunks of these models."
            )
        without_plan = sum(o.why == NO_PIPELINE_PLAN for row in by_config.values() if (o := row.get(layout)))
        not_run = sum(layout not in row for row in by_config.values())
        if without_plan:
            lines.append(f"`{layout}`: {without_plan} configurations have no pipeline plan (*no plan*).")
        if not_run:
            lines.append(f"**`{layout}` was not run for {not_run} of {len(by_config)} configurations (*not run*).**")
    if older:
        lines.append("Some results are of earlier states of rotorch's source (`rotorch zoo --older`).")
    return [line for each in lines for line in (each, "")]


def _commits(outcomes: Iterable[Outcome]) -> str:
    """Commits of a row's outcomes: that of most layouts, then each other one with its layouts."""
    layouts: dict[str, list[str]] = {}
    for o in outcomes:
        commit = f"{o.commit[:10]}{'+' * o.commit.endswith('+')}" if o.commit else "-"
        layouts.setdefault(commit, []).append(f"`{o.parallel}`")
    first, *others = sorted(layouts.items(), key=lambda item: -len(item[1])) or [("", [])]
    return ", ".join([first[0], *(f"{commit} ({', '.join(of)})" for commit, of in others)])


def _in_words(outcome: Outcome) -> str:
    return "exact" if outcome.ok else f"{'refused' if outcome.refused else 'NOT'}: {outcome.why}"


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return "not run"
    if outcome.why == NO_PIPELINE_PLAN:
        return "no plan"
    return "exact" if outcome.ok else "refused" if outcome.refused else "no"
