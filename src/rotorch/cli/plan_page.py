"""A page of its own for `rotorch plan --html`: no scripts, nothing from elsewhere, readable on a phone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from rotorch.core.quantities import format_bytes, format_count
from rotorch.planner.memory import CATEGORIES
from rotorch.planner.search import Plan, SearchResult, Task, parts_of_time

_SHOWN = 8
_COLOURS = ("#4e79a7", "#f28e2b", "#e15759", "#76b7b2", "#59a14f", "#edc948", "#b07aa1", "#9c755f")
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:52rem;margin:1rem auto;padding:0 .8rem;color:#222}
h1{font-size:1.3rem}h2{font-size:1.05rem;margin-top:2rem}code{font-size:.9em;overflow-wrap:anywhere}
.bar{display:flex;height:1.1rem;background:#eee;margin:.1rem 0 .6rem}.bar i{display:block;height:100%}
.key{display:flex;flex-wrap:wrap;gap:.2rem .9rem;font-size:.85rem}.key b{display:inline-block;width:.8rem;height:.8rem}
.all{overflow-x:auto}table{border-collapse:collapse;font-size:.85rem}td,th{padding:.15rem .6rem;text-align:left}
tr:nth-child(even){background:#f6f6f6}svg{width:100%;height:auto}
"""


def page(found: SearchResult, chosen: Plan, *, task: Task) -> str:
    """The frontier, the best layouts side by side, and why each other lost."""
    best = _one_per_layout(found)[:_SHOWN]
    cluster, batch = task.cluster, task.batch
    title = f"{task.spec.name} on {cluster.name}"
    assert chosen.tokens_per_s is not None
    sections = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{format_count(task.spec.num_parameters)} parameters, {cluster.num_devices} ranks, {batch.rows} x "
        f"{batch.tokens} tokens a step, {format_bytes(task.budget_bytes)} per rank.</p>",
        f"<p>Chosen: <code>--parallel {escape(chosen.parallel)} train.micro_batch={chosen.micro_batch}</code>, "
        f"{chosen.step_s:.3g} s a step, {format_count(chosen.tokens_per_s)} tokens/s, "
        f"{format_bytes(chosen.memory.total_bytes)} at the highest moment.</p>",
        "<h2>Speed and memory</h2>",
        _scatter(found, chosen, budget_bytes=task.budget_bytes),
        "<h2>Memory at the highest moment of a step</h2>",
        _key(CATEGORIES),
        *_bars(best, {p.parallel: p.memory.by_category for p in best}, show=format_bytes),
        "<h2>Time of a step</h2>",
        _key(list(parts_of_time(chosen.time)) if chosen.time is not None else []),
        *_bars(best, {p.parallel: parts_of_time(p.time) for p in best if p.time is not None}, show=_seconds),
        "<h2>All plans</h2>",
        _table(found),
        "<h2>Layouts that cannot hold the model</h2>",
        "".join(f"<p><code>{escape(text)}</code>: {escape(why)}</p>" for text, why in found.refused.items())
        or "<p>None.</p>",
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>{''.join(sections)}</body></html>\n"
    )


def _one_per_layout(found: SearchResult) -> list[Plan]:
    shown: dict[str, Plan] = {}
    for plan in found.plans:
        if plan.fits:
            shown.setdefault(plan.parallel, plan)
    return list(shown.values())


def _seconds(value: float) -> str:
    return f"{value:.3g} s"


def _key(names: Sequence[str]) -> str:
    entries = (
        f'<span><b style="background:{c}"></b> {escape(n)}</span>' for n, c in zip(names, _COLOURS, strict=False)
    )
    return f'<div class="key">{"".join(entries)}</div>'


def _bars(plans: Sequence[Plan], values: Mapping[str, Mapping[str, float]], *, show: object) -> list[str]:
    assert callable(show)
    most = max((sum(values[plan.parallel].values()) for plan in plans), default=1.0)
    lines = []
    for plan in plans:
        of = values[plan.parallel]
        parts = (
            f'<i style="width:{100 * value / most:.2f}%;background:{colour}" title="{escape(name)}: {show(value)}"></i>'
            for (name, value), colour in zip(of.items(), _COLOURS, strict=False)
        )
        lines.append(f"<div><code>{escape(plan.parallel)}</code> {show(sum(of.values()))}</div>")
        lines.append(f'<div class="bar">{"".join(parts)}</div>')
    return lines


def _scatter(found: SearchResult, chosen: Plan, *, budget_bytes: float) -> str:
    """Every plan that fits: memory to the right, tokens per second upwards; the frontier is a line."""
    fit = [plan for plan in found.plans if plan.fits]
    fastest = max(plan.tokens_per_s or 0.0 for plan in fit)

    def place(plan: Plan) -> tuple[float, float]:
        return 10 + 580 * plan.memory.total_bytes / budget_bytes, 290 - 270 * (plan.tokens_per_s or 0.0) / fastest

    dots = []
    for plan in fit:
        x, y = place(plan)
        colour = "#e15759" if plan is chosen else "#4e79a7"
        told = f"{plan.parallel}, micro-batch {plan.micro_batch}: {format_bytes(plan.memory.total_bytes)}"
        dots.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"><title>{escape(told)}</title></circle>')
    line = " ".join("{:.1f},{:.1f}".format(*place(plan)) for plan in found.frontier)
    return (
        '<svg viewBox="0 0 600 310" role="img" aria-label="tokens per second over memory">'
        '<path d="M10 10V290H590" fill="none" stroke="#999"/>'
        f'<polyline points="{line}" fill="none" stroke="#e15759"/>{"".join(dots)}'
        f'<text x="14" y="14" font-size="11">{format_count(fastest)} tokens/s</text>'
        f'<text x="500" y="305" font-size="11">{format_bytes(budget_bytes)}</text></svg>'
    )


def _table(found: SearchResult) -> str:
    rows = [
        f"<tr><td><code>{escape(plan.parallel)}</code></td><td>{plan.micro_batch} x {plan.accumulation}</td>"
        f"<td>{'' if plan.step_s is None else _seconds(plan.step_s)}</td>"
        f"<td>{format_bytes(plan.memory.total_bytes)}</td><td>{escape(plan.why_not) or 'chosen by speed'}</td></tr>"
        for plan in found.plans
    ]
    head = "<tr><th>layout</th><th>micro-batch</th><th>step</th><th>memory</th><th>why not</th></tr>"
    return f'<div class="all"><table>{head}{"".join(rows)}</table></div>'
