"""Writes the tables of README.md and docs/ that show measurements, from the records in `results/`.

    python benchmarks/pages.py            # writes what stands between "<!-- made by benchmarks/pages.py: NAME -->" and
    python benchmarks/pages.py --check    # "<!-- end of NAME -->"; or only says which page is not of its records

Nobody copies figures by hand, and a test holds pages and records together. A row that a record does not have is "-".
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path("benchmarks") / "results"
NONE = "-"
OUT_OF_PLACE = "rtp=8[transport=send_receive]"
ALIKE = 0.05
"""Ratios closer to 1 than this say "as fast": the machine tells no smaller ones apart."""

PROCESSES = "All rows have the same processes, but for those as torch leaves them."
"""A test holds that each row's record has their settings."""

Record = Mapping[str, Any]


def speed(read: Callable[[str], Record]) -> list[str]:
    """README.md: layouts and peers on two ranks, of the records of `make bars`."""
    with_512, with_64 = (read(f"bars/llama-h384-2ranks-{tokens}tokens.json") for tokens in (512, 64))
    names = {
        "torch-ddp": "torch's DDP",
        "fsdp2": "torch's FSDP2, block by block",
        "fsdp2-as-is": "the same in processes as torch leaves them",
        "hf-fsdp2": "transformers' own FSDP2",
        "rtp=2": "rtp=2",
        "rtp=2[recompute=none]": "rtp=2[recompute=none]",
        "rtp=2[transport=send_receive]": "rtp=2[transport=send_receive]",
    }
    lines = table_head(
        "layout",
        "of the limit, median of rounds",
        "the same with 64 tokens each",
        "weights + gradients + optimizer per rank",
        "peak of tensors",
        "sent per rank and step",
        "on the wire",
    )
    for name, shown in names.items():
        more, less = row_of(with_512, name), row_of(with_64, name)
        bytes_of = [more.get(key) for key in ("resident_bytes_per_rank", "peak_bytes_per_rank", "sent_bytes_per_rank")]
        wire = more["wire_bytes_all_ranks"] / more["nproc"] if "wire_bytes_all_ranks" in more else None
        cells = [*(two_digits(row.get("ratio_to_limit")) for row in (more, less)), *map(mebibytes, [*bytes_of, wire])]
        lines.append(f"| {shown} | {' | '.join(cells)} |")
    origins = [origin_of(with_512, "With 512 tokens it"), origin_of(with_64, "With 64 it")]
    return [*lines, "", *wrapped([*origins, PROCESSES])]


def grids(read: Callable[[str], Record]) -> list[str]:
    """docs/grids.md: how many times as fast a 2 x 2 x 2 grid is, over shared memory and over messages as its peers."""
    models, products = read("grid-models-8ranks.json"), read("grids-8ranks.json")
    lines = table_head("against", "forward", "backward", "over messages: forward", "backward")
    for row in models["rows"]:
        if row["layout"] in ("megatron=8", "ddp=2,summa=2x2"):
            found = [row["first_is_faster_by"][phase] for phase in ("forward_s", "backward_s")]
            lines.append(f"| `{row['layout']}` | {' | '.join(map(two_digits, found))} | {NONE} | {NONE} |")
    rows = {row["name"]: row for row in products["rows"]}
    (shared, ours), peers = list(rows.values())[:2], {}
    for name, shown in {
        "colossalai 2x2x2, summed over depth by hand": "ColossalAI's 2.5-D layers, depth summed by hand",
        "megatron-core tensor parallel 8": "Megatron-Core's tensor parallelism on 8 ranks",
        "torch tensor parallel 8": "torch's tensor parallelism on 8 ranks",
    }.items():
        if name in rows:
            peers[shown] = found = [
                faster_by(side, rows[name], phase) for side in (shared, ours) for phase in ("forward_s", "backward_s")
            ]
            lines.append(f"| an MLP: {shown} | {' | '.join(map(two_digits, found))} |")
    verdicts = [
        f"Against {shown} a grid over messages is {verdict(found[2])} in forward and {verdict(found[3])} in backward; "
        f"over shared memory it is {verdict(found[0])} in forward, and {verdict(found[1])} in backward."
        for shown, found in peers.items()
    ]
    return [*lines, "", *wrapped([*verdicts, origin_of(models, "The first part"), origin_of(products, "The MLP")])]


def pipelines(read: Callable[[str], Record]) -> list[str]:
    """docs/pipelines.md: pipelines beside torch's, as it comes and gathered once a step."""
    record = read("pipelines-4ranks.json")
    peer, expert = (row_of(record, name) for name in ("pipeline-fsdp2", "pipeline-fsdp2-keep"))
    lines = table_head("layout", "tokens/s", "peak bytes", "tokens/s of -keep", "peak of -keep", "gathers", "sums")
    for row in record["rows"]:
        ratios = [
            divided(row.get(key), by.get(key))
            for by in (peer, expert)
            for key in ("tokens_per_s", "peak_bytes_per_rank")
        ]
        counts = [row.get("messages_by_kind", {}).get(kind, 0) for kind in ("all_gather", "reduce_scatter")]
        lines.append(f"| `{row['parallel']}` | {' | '.join([*map(two_digits, ratios), *map(str, counts)])} |")
    zeropp, said = row_of(record, "zeropp=2x2"), []
    for by, shown in ((peer, "as it comes"), (expert, "gathered once a step")):
        faster = divided(zeropp.get("tokens_per_s"), by.get("tokens_per_s"))
        larger = divided(zeropp.get("peak_bytes_per_rank"), by.get("peak_bytes_per_rank"))
        said.append(
            f"Against torch's 1F1B {shown} `zeropp=2x2` is {two_digits(faster)} times as fast at {two_digits(larger)} "
            "of its peak."
            if faster is not None
            else f"This record does not have torch's 1F1B {shown}."
        )
    ranks = [rank for found in record["pipelines"]["peaks"].values() for rank in found]
    off = max(abs(rank["measured"] / rank["simulated"] - 1) for rank in ranks)
    said.append(f"Measured peaks are within {math.ceil(1000 * off) / 10} % of the simulated ones, on every rank.")
    return [*lines, "", *wrapped([*said, origin_of(record), PROCESSES])]


def layouts_at_scale(read: Callable[[str], Record]) -> list[str]:
    """docs/scale.md: memory, bytes and messages of one rank, by the Layouts, as ranks are added."""
    record = read("scale/scale.json")
    shown = (8, 64, 256, 1024)
    lines = table_head("layout, n replicas", "of one rank", *(f"{ranks:,} ranks" for ranks in shown))
    for family in dict.fromkeys(row["family"] for row in record["layouts"]):
        rows = {row["ranks"]: row for row in record["layouts"] if row["family"] == family}
        for key, name in (("at_rest_bytes", "at rest"), ("sent_bytes", "sent"), ("messages", "messages")):
            cells = [_at_scale(rows.get(ranks), key) for ranks in shown]
            lines.append(f"| `{family}` | {name} | {' | '.join(cells)} |")
    return lines


def _at_scale(row: Record | None, key: str) -> str:
    if row is None:
        return NONE
    return f"{row[key]:,}" if key == "messages" else f"{row[key] / 2**30:,.1f} GiB"


def steps_at_scale(read: Callable[[str], Record]) -> list[str]:
    """docs/scale.md: steps that are done once per rank, or by one rank for all."""
    record = read("scale/scale.json")
    lines = table_head("step", "whose", "layout", "processor time", "memory", "counted")
    for row in record["rows"]:
        if row["ranks"] not in (64, 1024):
            continue
        counted = ", ".join(f"{number:,} {name.replace('_', ' ')}" for name, number in row["counts"].items())
        lines.append(
            f"| {row['step']} | {row['whose']} | `{row['layout']}` | {row['cpu_s']:.2f} s | "
            f"{mebibytes(row['peak_bytes'])} | {counted} |"
        )
    return [*lines, "", *wrapped([origin_of(record)])]


PUBLISHED_GB = {
    "GPT-2 355M": {"ddp=8": 46.3, "fsdp, one unit": 26.1, OUT_OF_PLACE: 5.9},
    "GPT-2 774M": {"ddp=8": 75.4, "fsdp, one unit": 42.5, OUT_OF_PLACE: 11.3},
    "GPT-2 1.5B": {OUT_OF_PLACE: 29.1},
}
"""RTP's own peaks on 8 A100 (arXiv 2311.01635); what is missing did not fit. Its batch is not known here."""
FOUR = 4
"""Sequences of a rank that all models were measured with."""


def rtp_peaks(read: Callable[[str], Record]) -> list[str]:
    """docs/papers.md: the highest moment of a step, by model and layout."""
    record = read("papers/rtp.json")
    names = list(dict.fromkeys(row["parallel"] for row in record["peaks"]))
    lines = table_head("model", "sequences", "ideal", *(f"`{name}`" for name in names), "ideal / rtp")
    for model, rows in dict.fromkeys((row["model"], row["rows"]) for row in record["peaks"]):
        found = {row["parallel"]: row for row in record["peaks"] if (row["model"], row["rows"]) == (model, rows)}
        peaks = [gigabytes(found[name]["peak_bytes"]) if name in found else NONE for name in names]
        cells = [gigabytes(found[OUT_OF_PLACE]["ideal_bytes"]), *peaks, two_digits(found[OUT_OF_PLACE]["of_ideal"])]
        lines.append(f"| {model}, {found[OUT_OF_PLACE]['tokens']} tokens | {rows} | {' | '.join(cells)} |")
    return lines


def rtp_ratios(read: Callable[[str], Record]) -> list[str]:
    """docs/papers.md: how many times what a rank of rtp holds the authors' baselines hold, published and here."""
    record = read("papers/rtp.json")
    lines = table_head("model", "DDP / rtp, published", "here", "FSDP as one unit / rtp, published", "here")
    for model, published in PUBLISHED_GB.items():
        rows = (row for row in record["peaks"] if (row["model"], row["rows"]) == (model, FOUR))
        here = {row["parallel"]: row["peak_bytes"] for row in rows}
        cells = [
            two_digits(divided(peaks.get(name), peaks[OUT_OF_PLACE]))
            for name in ("ddp=8", "fsdp, one unit")
            for peaks in (published, here)
        ]
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return lines


def rtp_shares(read: Callable[[str], Record]) -> list[str]:
    """docs/papers.md: a rank's peak beside its share of one process's, with as much computed again."""
    again = {"none": "nothing", "blocks": "every block"}
    lines = table_head("computed again", "layout", "peak", "share of one process", "share / peak")
    for row in read("papers/rtp.json")["shares"]:
        cells = [f"`{row['parallel']}`", *map(mebibytes, (row["peak_bytes"], row["ideal_bytes"]))]
        lines.append(f"| {again[row['again']]} | {' | '.join(cells)} | {two_digits(row['of_ideal'])} |")
    return lines


def long_sequences(read: Callable[[str], Record]) -> list[str]:
    """docs/long_context.md: layouts of two ranks and two sequences of 4,096 tokens, of the record of `long.toml`."""
    record = read("long/llama-h384-4096-2ranks-4096tokens.json")
    lines = table_head("layout", "of the limit, median of rounds", "peak of tensors per rank", "sent per rank and step")
    for row in record["rows"]:
        cells = (
            two_digits(row["ratio_to_limit"]),
            *map(mebibytes, (row["peak_bytes_per_rank"], row["sent_bytes_per_rank"])),
        )
        lines.append(f"| `{row['parallel']}` | {' | '.join(cells)} |")
    return [*lines, "", *wrapped([origin_of(record)])]


def experts(read: Callable[[str], Record]) -> list[str]:
    """docs/long_context.md: layouts of a mixture of experts on two ranks, of the records of `experts.toml`."""
    records = {tokens: read(f"experts/mixtral-h256-2ranks-{tokens}tokens.json") for tokens in (64, 512)}
    lines = table_head(
        "layout", *(f"{n} tokens: {what}" for n in records for what in ("of the limit", "peak", "on the wire"))
    )
    rows = zip(*(record["rows"] for record in records.values()), strict=True)
    for of_layout in rows:
        cells = [
            cell
            for row in of_layout
            for cell in (
                two_digits(row["ratio_to_limit"]),
                mebibytes(row["peak_bytes_per_rank"]),
                mebibytes(row["wire_bytes_all_ranks"] / len(row["sent_bytes_by_rank"])),
            )
        ]
        lines.append(f"| `{of_layout[0]['parallel']}` | {' | '.join(cells)} |")
    return [
        *lines,
        "",
        *wrapped([origin_of(record, f"The part with {tokens} tokens") for tokens, record in records.items()]),
    ]


def rtp_capacity(read: Callable[[str], Record]) -> list[str]:
    """docs/papers.md: the largest model within a rank's memory, by ranks."""
    lines = table_head("ranks", "layers", "parameters", "peak", "with one layer more", "times one process")
    for row in read("papers/rtp.json")["capacity"]:
        peaks = map(gigabytes, (row["peak_bytes"], row["peak_bytes_one_layer_more"]))
        times = two_digits(row["times_one_process"])
        parameters = f"{row['parameters'] / 1e9:.2f} billion"
        lines.append(f"| {row['ranks']} | {row['layers']} | {parameters} | {' | '.join(peaks)} | {times} |")
    return lines


def rtp_building(read: Callable[[str], Record]) -> list[str]:
    """docs/papers.md: memory that building takes, and where all figures of the section are from."""
    record = read("papers/rtp.json")
    lines = table_head("a rank's part of GPT-2 355M", "held in the end", "most while building")
    for row in record["building"]:
        lines.append(f"| {row['way']} | {mebibytes(row['held_bytes'])} | {mebibytes(row['peak_bytes'])} |")
    return [*lines, "", *wrapped([origin_of(record, "All of this"), *others_of(record)])]


def caat_net(read: Callable[[str], Record]) -> list[str]:
    """docs/papers.md: held-out loss and bytes where a part of the channels is summed."""
    record = read("papers/caat_net.json")
    lines = table_head("layout", "held out, bits per byte", "over seeds", "a rank sends in a step")
    for row in record["summary"]:
        bits = [f"{row[f'{name}_bits_per_byte']:.3f}" for name in ("mean", "least", "most")]
        lines.append(f"| `{row['parallel']}` | {bits[0]} | {bits[1]} to {bits[2]} | {row['sent_bytes'] / 1e6:.1f} MB |")
    return [*lines, "", *wrapped([origin_of(record)])]


def zeropp_bubbles(read: Callable[[str], Record]) -> list[str]:
    """docs/papers.md: idle part of a step by schedule, measured, of its table, and by its paper's formula."""
    record = read("papers/zeropp.json")
    lines = table_head("schedule", "layout", "measured", "its table", "formula", "off by, points", "ms per computation")
    for row in record["bubbles"]:
        measured = [row[key] for key in ("bubble", "bubble_of_table", "bubble_of_formula")]
        late_s = median(row["step_s_all"]) - row["table_s"]
        cells = [
            *map(percent, measured),
            f"{100 * (measured[0] - measured[1]):.1f}",
            f"{1000 * late_s / row['computations']:.1f}",
        ]
        lines.append(f"| {row['schedule']} | `{row['parallel']}` | {' | '.join(cells)} |")
    return lines


ZEROPP, THREE_D = "zeropp=2x2", "pp=2,megatron=2[transport=messages]"


def zeropp_sizes(read: Callable[[str], Record]) -> list[str]:
    """docs/papers.md: step in terms of products, bytes and peak of pipelines on 2 x 2 ranks, by length."""
    rows = read("papers/zeropp.json")["sizes"]
    lengths = {row["tokens"]: row["of_condition"] for row in rows}
    lines = table_head("layout", "of a rank", *(f"{n} tokens: {of:g}" for n, of in lengths.items()))
    for name in dict.fromkeys(row["parallel"] for row in rows):
        found = {row["tokens"]: row for row in rows if row["parallel"] == name and "invalid" not in row}
        for shown, cell in (
            ("step", lambda row: f"{row['step_s'] / row['products_s']:.2f}"),
            ("sent", lambda row: f"{row['sent_bytes'] / 1e6:.2f} MB"),
            ("peak", lambda row: f"{row['peak_bytes'] / 1e6:.2f} MB"),
        ):
            cells = [cell(found[n]) if n in found else NONE for n in lengths]
            lines.append(f"| `{name}` | {shown} | {' | '.join(cells)} |")
    return lines


def zeropp_crossings(read: Callable[[str], Record]) -> list[str]:
    """docs/papers.md: where zeropp takes less than tensor parallelism, and where all of the section is from."""
    record = read("papers/zeropp.json")
    lines = table_head(f"`{ZEROPP}` takes less than `{THREE_D}`", "2 s U b / 9 h")
    lines += ["| bytes sent, by the paper's formula, as many rows on each rank | 1.00 |"]
    lines += ["| bytes sent, by the same count at the same global batch | 0.50 |"]
    for key, shown in (
        ("sent_bytes", "bytes sent, by the meter"),
        ("wire_bytes", "bytes on the busiest link"),
        ("step_of_products", "time of a step"),
        ("peak_bytes", "peak of tensors"),
    ):
        lines.append(f"| {shown} | {two_digits(record['crossings'][key])} |")
    said = []
    for row in record["again"]:
        (before,) = (
            one
            for one in record[row["part"]]
            if (one["parallel"], one.get("tokens")) == (row["parallel"], row.get("tokens"))
        )
        if "bubble" not in row:
            said.append(f"`{row['parallel']}` measured twice: {before['step_s']:.2f} s and {row['step_s']:.2f} s.")
        elif row["busy_s"] < 1.5 * before["busy_s"]:
            said.append(
                f"`{row['parallel']}` measured twice: {percent(before['bubble'])} and {percent(row['bubble'])}."
            )
        else:
            off = [100 * (one["bubble"] - one["bubble_of_table"]) for one in (before, row)]
            said.append(
                f"On a device of half the rate `{row['parallel']}` is off by {off[1]:.1f} points, not {off[0]:.1f}."
            )
    said.append(origin_of(record, "The last part"))
    if record.get("earlier_runs"):
        runs = [f"{run['commit'][:10]} (load {run['machine']['load_average'][0]})" for run in record["earlier_runs"]]
        said.append(f"Other parts were measured at commits {', '.join(runs)}.")
    return [*lines, "", *wrapped(said)]


def tesseract_strong(read: Callable[[str], Record]) -> list[str]:
    """docs/papers.md: speed of 2.5-D beside 1-D on 8 emulated hosts, by phase, over sizes and rates of links."""
    record = read("papers/tesseract.json")
    lines = table_head(
        "tokens per feature", "products / wire of 1-D", "1-D sends", "2.5-D sends", "forward", "backward", "step"
    )
    sent = {(row["parallel"], row["tokens_per_feature"]): row["sent_bytes"] for row in record["strong"]}
    for row in (row for row in record["ratios"] if row["against"] == ONE_D):
        size, by = row["tokens_per_feature"], row["faster_by"]
        bytes_of = [f"{sent[name, size] / 1e6:.2f} MB" for name in (ONE_D, TWO_AND_A_HALF_D)]
        speeds = [two_digits(by[name]) for name in ("forward_s", "backward_s", "step_s")]
        lines.append(f"| {size:g} | {row['ratio']:g} | {' | '.join([*bytes_of, *speeds])} |")
    return lines


ONE_D, TWO_AND_A_HALF_D = "megatron=8", "tesseract=2x2x2"


def tesseract_crossings(read: Callable[[str], Record]) -> list[str]:
    """docs/papers.md: from how many tokens on 2.5-D takes less than 1-D, and weak scaling."""
    record = read("papers/tesseract.json")
    lines = table_head(f"`{TWO_AND_A_HALF_D}` takes less than `{ONE_D}`", "from tokens per feature on")
    lines.append(f"| bytes sent, by the formulas | {two_digits(record['crossing_by_formula'])} |")
    for key, shown in (
        ("sent_bytes", "bytes sent, by the meter"),
        ("wire_bytes", "bytes on the busiest link"),
        ("forward_s", "time of forward"),
        ("step_s", "time of a step"),
    ):
        found = record["crossings"][key]
        lines.append(f"| {shown} | {'all of these' if found is None else two_digits(found)} |")
    lines += ["", *table_head("hosts", "layout", "forward", "backward", "step, seconds")]
    for row in record["weak"]:
        times = [two_digits(row[name]) for name in ("forward_s", "backward_s", "step_s")]
        lines.append(f"| {row['hosts']} | `{row['parallel']}` | {' | '.join(times)} |")
    return [*lines, "", *wrapped([origin_of(record, "All of this")])]


def dawnpiper(read: Callable[[str], Record]) -> list[str]:
    """docs/papers.md: the largest micro-batch of a pipeline in a fixed memory, by the cut of its layers."""
    record = read("papers/dawnpiper.json")
    lines = table_head(
        "a rank has", "asked for", "came to", "rows", "peaks of the ranks, MiB", "largest by smallest", "slowest"
    )
    equal = {row["limit_bytes"]: row["rows"] for row in record["rows"][::-1] if "rank_memory" not in row["asked"]}
    for row in record["rows"]:
        limit = row["limit_bytes"]
        rows = f"{row['rows']} ({two_digits(row['rows'] / equal[limit])})"
        peaks = ", ".join(f"{peak / 2**20:.0f}" for peak in row["peaks"])
        came_to = "the same" if row["layout"] == row["asked"] else f"`{row['layout']}`"
        cells = [f"{limit >> 20} MiB", f"`{row['asked']}`", came_to, rows, peaks]
        lines.append(f"| {' | '.join(cells)} | {two_digits(row['max_by_min'])} | {two_digits(row['slowest'])} |")
    return [*lines, "", *wrapped([origin_of(record)])]


PAGES: Mapping[str, tuple[Path, Callable[[Callable[[str], Record]], list[str]]]] = {
    "speed": (Path("README.md"), speed),
    "grids": (Path("docs") / "grids.md", grids),
    "pipelines": (Path("docs") / "pipelines.md", pipelines),
    "layouts at scale": (Path("docs") / "scale.md", layouts_at_scale),
    "steps at scale": (Path("docs") / "scale.md", steps_at_scale),
    "rtp peaks": (Path("docs") / "papers.md", rtp_peaks),
    "rtp ratios": (Path("docs") / "papers.md", rtp_ratios),
    "rtp shares": (Path("docs") / "papers.md", rtp_shares),
    "long sequences": (Path("docs") / "long_context.md", long_sequences),
    "experts": (Path("docs") / "long_context.md", experts),
    "rtp capacity": (Path("docs") / "papers.md", rtp_capacity),
    "rtp building": (Path("docs") / "papers.md", rtp_building),
    "tesseract strong": (Path("docs") / "papers.md", tesseract_strong),
    "tesseract crossings": (Path("docs") / "papers.md", tesseract_crossings),
    "caat-net": (Path("docs") / "papers.md", caat_net),
    "zeropp bubbles": (Path("docs") / "papers.md", zeropp_bubbles),
    "zeropp sizes": (Path("docs") / "papers.md", zeropp_sizes),
    "zeropp crossings": (Path("docs") / "papers.md", zeropp_crossings),
    "dawnpiper": (Path("docs") / "papers.md", dawnpiper),
}


def row_of(record: Record, name: str) -> Mapping[str, Any]:
    """A row's figures; none of one that is not there, failed, or whose losses are wrong."""
    found = next((row for row in record["rows"] if row["parallel"] == name), {})
    return {} if {"error", "invalid"} & set(found) else found


def faster_by(ours: Mapping[str, Any], theirs: Mapping[str, Any], phase: str) -> float:
    """Speed of ours relative to the other: the median of the rounds' ratios."""
    rounds = zip(theirs[f"{phase}_all"], ours[f"{phase}_all"], strict=True)
    return median(their_s / our_s for their_s, our_s in rounds)


def verdict(ratio: float) -> str:
    """A ratio of speeds in a word."""
    return "as fast" if abs(ratio - 1) < ALIKE else "faster" if ratio > 1 else "slower"


def origin_of(record: Record, what: str = "") -> str:
    """Commit, date and load of a record of something."""
    commit, load = record["commit"][:10], record["machine"]["load_average"][0]
    return f"{what or 'This'} was measured at commit {commit}, on {record['date'][:10]}, load before {load}."


def others_of(record: Record) -> list[str]:
    """The parts of a record that are of another commit than the last, as a sentence."""
    others = {part: commit[:10] for part, commit in record.get("commits", {}).items() if commit != record["commit"]}
    return [f"Except for {', '.join(f'{part} ({commit})' for part, commit in others.items())}."] if others else []


def table_head(*columns: str) -> list[str]:
    """The first two lines of a Markdown table."""
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def divided(one: float | None, by: float | None) -> float | None:
    """One by the other; None if a record lacks either."""
    return None if one is None or by is None else one / by


def two_digits(value: float | None) -> str:
    """A ratio as a cell."""
    return NONE if value is None else f"{value:.2f}"


def percent(part: float) -> str:
    """A part of a whole as a cell."""
    return f"{100 * part:.1f} %"


def mebibytes(value: float | None) -> str:
    """Bytes as a cell."""
    return NONE if value is None else f"{value / 2**20:,.{0 if value >= 100 * 2**20 else 1}f} MiB"


def gigabytes(value: float) -> str:
    """Bytes as a cell, in the unit of the papers."""
    return f"{value / 1e9:,.2f} GB"


def wrapped(sentences: Iterable[str], *, width: int = 120) -> list[str]:
    """Sentences as lines of a paragraph."""
    lines = [""]
    for word in " ".join(sentences).split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def read_record(name: str) -> Record:
    """A file of `results/`."""
    found: Record = json.loads((ROOT / RESULTS / name).read_text("utf-8"))
    return found


def with_block(text: str, name: str, lines: Sequence[str]) -> str:
    """A page with the lines in place of those that stand between the marks of that name."""
    begin, end = f"<!-- made by benchmarks/pages.py: {name} -->\n", f"<!-- end of {name} -->"
    head, found, rest = text.partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise SystemExit(f"pages: no block {name!r}. Write {begin.strip()} and {end} into the page")
    return "".join([head, begin, "\n".join(lines), "\n", end, tail])


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes all blocks; with --check says which are not of their records, and returns 1 if any is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    given = parser.parse_args(arguments)
    code = 0
    for name, (page, make) in PAGES.items():
        before = (ROOT / page).read_text("utf-8")
        after = with_block(before, name, make(read_record))
        if after == before:
            continue
        if given.check:
            print(f"{page}: {name}: not what its records say. Run python benchmarks/pages.py")
            code = 1
        else:
            (ROOT / page).write_text(after, "utf-8")
            print(f"{page}: {name}: written")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
