"""`rotorch schedule`: a pipeline's table as figures, as a picture in the terminal and as a page. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from rotorch.bench.action_looks import LOOKS, shade
from rotorch.bench.gantt import Bar, Kind, Level, gantt_page
from rotorch.core.errors import ConfigError, nearest
from rotorch.pipelining.actions import COMPUTE, SENDS, ActionKind, Schedule
from rotorch.pipelining.baselines import BASELINES, make_schedule
from rotorch.pipelining.simulate import (
    ACTIVATIONS,
    CATEGORIES,
    GRADIENTS,
    WEIGHTS,
    Link,
    Simulation,
    StageCosts,
    TimedAction,
    simulate,
)
from rotorch.strategies.zeropp.schedule import make_zeropp_schedule

ZEROPP = "zeropp"
NAMES = (ZEROPP, *BASELINES)

_DOES, _COLLECTIVES, _MESSAGES = "", " gathers and sums", " messages"
_SLOT = "slots"


def named_schedule(name: str, *, stages: int, chunks: int, micro_batches: int, unit: int | None) -> Schedule:
    """The table of any schedule there is, of plain rows. Raises `ConfigError` if none has this name and shape."""
    sizes = {"num_ranks": stages, "num_chunks": chunks, "num_micro_batches": micro_batches}
    if name == ZEROPP:
        return make_zeropp_schedule(**sizes, unit=unit)
    if name not in BASELINES:
        raise ConfigError(f"schedule {name!r}: unknown{nearest(name, known=NAMES)}. Write one of {', '.join(NAMES)}")
    return make_schedule(name, **sizes, unit=unit)


def simulated(schedule: Schedule, *, gather: float, message: float) -> Simulation:
    """Simulates a schedule in slots: a stage's forward of one micro-batch takes one, as does each of its gradients."""
    for what, slots in (("gather", gather), ("message", message)):
        if not slots >= 0:
            raise ConfigError(f"schedule {schedule.name}: --{what} {slots:g}. Write the slots it takes, 0 or more")
    costs = StageCosts(unshard_s=gather, reduce_s=gather, weight_bytes=1, gradient_bytes=1)
    return simulate(schedule, costs=costs, link=Link(latency_s=message))


def figures(found: Simulation) -> dict[str, Any]:
    """Returns the figures of `--json`. Peaks are in micro-batches of a rank's part of the model, and in chunks."""
    schedule, chunks = found.schedule, found.schedule.num_chunks
    return {
        "schedule": schedule.name,
        "stages": schedule.num_ranks,
        "chunks": chunks,
        "unit": schedule.unit,
        "micro_batches": schedule.num_micro_batches,
        "makespan_slots": found.makespan_s,
        "bubble_slots": found.bubble_s,
        "bubble_ratio": found.bubble_ratio,
        "most_in_flight": schedule.most_in_flight / chunks,
        "ranks": [
            {
                "rank": rank,
                "chunks_of_model": schedule.stages_of(rank),
                "busy_slots": found.busy_s(rank),
                "peak_micro_batches": found.peak_bytes(rank, category=ACTIVATIONS) / chunks,
                "peak_whole_weights": found.peak_bytes(rank, category=WEIGHTS),
                "peak_whole_gradients": found.peak_bytes(rank, category=GRADIENTS),
                "gathers": schedule.count(ActionKind.UNSHARD, rank=rank),
                "gradient_sums": schedule.count(ActionKind.REDUCE_GRAD, rank=rank),
                "sends": sum(schedule.count(kind, rank=rank) for kind in SENDS),
            }
            for rank in range(schedule.num_ranks)
        ],
    }


def headlines(found: Simulation) -> list[str]:
    """The figures in words: kind, bubble, memory, traffic."""
    schedule, numbers = found.schedule, figures(found)
    ranks = numbers["ranks"]

    def span(key: str) -> str:
        low, high = min(r[key] for r in ranks), max(r[key] for r in ranks)
        return f"{high:g}" if low == high else f"{low:g} to {high:g}"

    return [
        f"{schedule.name}: {schedule.num_ranks} ranks of {schedule.num_chunks} chunks, {schedule.num_micro_batches} "
        f"micro-batches in {schedule.num_units} units of {schedule.unit}",
        f"bubble: {found.bubble_s:g} of {found.makespan_s:g} slots ({100 * found.bubble_ratio:.1f} %)",
        f"peak per rank: activations of {span('peak_micro_batches')} micro-batches (bound "
        f"{numbers['most_in_flight']:g}), whole weights of {span('peak_whole_weights')} and whole gradients of "
        f"{span('peak_whole_gradients')} chunks",
        f"per rank and step: {span('gathers')} gathers of a chunk's weights, {span('gradient_sums')} sums of its "
        f"gradients, {span('sends')} messages sent",
    ]


# ---------------------------------------------------------------- in the terminal


def picture(found: Simulation, *, width: int, colour: bool) -> Iterator[Text]:
    """A line per rank, time from left to right, at most `width` columns.

    In colour a column holds the last digit of the micro-batch; else F, I, W or B, lower case for odd chunks. Where
    there are more slots than columns, a column shows what is done in its middle.
    """
    label = len(f"rank {found.schedule.num_ranks - 1} ")
    columns = max(1, min(width - label, round(found.makespan_s)))
    per_column = found.makespan_s / columns
    for rank in range(found.schedule.num_ranks):
        mine = [e for e in found.timeline if e.rank == rank and e.action.kind in COMPUTE]
        line, place = Text(f"rank {rank} ".ljust(label)), 0
        for column in range(columns):
            moment = (column + 0.5) * per_column
            while place < len(mine) and mine[place].end_s <= moment:
                place += 1
            entry = mine[place] if place < len(mine) and mine[place].start_s <= moment else None
            line.append_text(_cell(found.schedule, entry, colour=colour))
        yield line


def legend(found: Simulation, *, colour: bool) -> Text:
    """Returns the legend of the columns of `picture`."""
    kinds = sorted({e.action.kind for e in found.timeline} & COMPUTE, key=list(LOOKS).index)
    line = Text()
    for kind in kinds:
        name, look = LOOKS[kind]
        line.append(f" {'' if colour else kind + ': '}{name} ", style=f"black on {look}" if colour else "")
    return line.append("  " + ("paler: later chunks" if colour else "lower case: odd chunks, .: idle"))


def _cell(schedule: Schedule, entry: TimedAction | None, *, colour: bool) -> Text:
    if entry is None:
        return Text(" " if colour else ".")
    chunk = entry.action.stage // schedule.num_ranks
    if not colour:
        return Text(entry.action.kind.lower() if chunk % 2 else entry.action.kind)
    assert entry.action.micro_batch is not None
    return Text(
        str(entry.action.micro_batch % 10),
        style=f"black on {shade(entry.action.kind, chunk, num_chunks=schedule.num_chunks)}",
    )


# ---------------------------------------------------------------- as a page


def page(found: Simulation) -> str:
    """A page of its own: the chart, and below it what each rank holds over time, in a row of its own."""
    schedule = found.schedule
    drawn = [entry for entry in found.timeline if entry.end_s > entry.start_s and entry.action.kind in LOOKS]
    used = {_lane(entry) for entry in drawn}
    lanes = [lane for lane in (_DOES, _COLLECTIVES, _MESSAGES) if lane in used]
    kinds = [
        Kind(
            LOOKS[kind][0] + (f", chunk {chunk}" if schedule.num_chunks > 1 else ""),
            shade(kind, chunk, num_chunks=schedule.num_chunks),
            bars,
        )
        for (kind, chunk), bars in sorted(
            _bars(schedule, drawn).items(), key=lambda item: (_order(item[0][0]), item[0][1])
        )
    ]
    return gantt_page(
        headlines(found),
        kinds,
        rows=[f"rank {rank}{lane}" for rank in range(schedule.num_ranks) for lane in lanes],
        unit=_SLOT,
        levels=[
            ("activations held, in micro-batches of a rank's part", _levels(found, activations=True)),
            ("chunks whose weights or gradients are whole", _levels(found, activations=False)),
        ],
    )


def _order(kind: ActionKind) -> int:
    return list(LOOKS).index(kind)


def _lane(entry: TimedAction) -> str:
    if entry.action.kind in COMPUTE:
        return _DOES
    return _MESSAGES if entry.action.kind in SENDS else _COLLECTIVES


def _bars(schedule: Schedule, drawn: list[TimedAction]) -> dict[tuple[ActionKind, int], list[Bar]]:
    bars: dict[tuple[ActionKind, int], list[Bar]] = {}
    for entry in drawn:
        action, row = entry.action, f"rank {entry.rank}{_lane(entry)}"
        says = f"chunk {action.stage} of the model"
        says += "" if action.micro_batch is None else f", micro-batch {action.micro_batch}"
        text = str(action.micro_batch) if action.kind in COMPUTE else ""
        bar = Bar(row, entry.start_s, entry.end_s - entry.start_s, says, text)
        bars.setdefault((action.kind, action.stage // schedule.num_ranks), []).append(bar)
    return bars


def _levels(found: Simulation, *, activations: bool) -> list[Level]:
    """Activations, or whole weights and gradients, that each rank holds over time."""
    levels = []
    for rank in range(found.schedule.num_ranks):
        held = [(m.time_s, dict(zip(CATEGORIES, m.held, strict=True))) for m in found.memory[rank]]
        levels.append(
            Level(
                f"rank {rank}",
                [
                    (t, of[ACTIVATIONS] / found.schedule.num_chunks if activations else of[WEIGHTS] + of[GRADIENTS])
                    for t, of in held
                ],
            )
        )
    return levels


# ---------------------------------------------------------------- the command


def schedule_command(
    name: str,
    *,
    stages: int,
    chunks: int,
    micro_batches: int,
    unit: int | None,
    gather: float,
    message: float,
    html: Path | None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Prints figures and picture, writes the page if asked for; returns the figures.

    Raises:
        ConfigError: for a schedule that there is not, before anything is printed or written.
    """
    if html is not None and (html.is_dir() or not html.absolute().parent.is_dir()):
        raise ConfigError(f"--html {html}: its directory is missing, or it is one. Write a file's path")
    plain = named_schedule(name, stages=stages, chunks=chunks, micro_batches=micro_batches, unit=unit)
    found = simulated(plain, gather=gather, message=message)
    console = console or Console(soft_wrap=True, highlight=False, markup=False)
    colour = console.color_system is not None
    for line in headlines(found):
        console.print(line)
    console.print()
    for drawn in picture(found, width=console.width, colour=colour):
        console.print(drawn)
    console.print(legend(found, colour=colour))
    if html is not None:
        html.write_text(page(found), "utf-8")
        console.print(f"written: {html}")
    return figures(found)
