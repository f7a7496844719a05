"""Matrix products of a layer whole and in 8 slices: what slicing costs, and what wins it back (see gpu.py).

Ways to compute `X [T, I] @ W [I, O]`, for weights cut along the output (columns: slices write their own columns) or
along the input (rows: slices add to one output, as attention's and the MLP's last products do):

    whole        one product
    slices       8 products, one after another
    two_streams  8 products on two streams in turn: the tail of one under the head of the next
    two_at_once  4 products of two slices each (`visits=4`); four_at_once: 2 of four
    apart        rows only: each slice's product by itself, then added: what `beta=1` saves
    unsummed     rows only: 8 products into one output without adding, which no real run can do: what adding costs

Gate and up of an MLP as one matrix are `gate_up`; as two, `gate` twice; `qkv` as three, `q` and `kv` twice. `of_whole`
is the time of the whole product over the time of the way: 1 is no loss.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

NUM_SLICES = 8
SHAPES: dict[str, tuple[int, int, str]] = {  # name: inputs, outputs, cut along; Llama-3-8B
    "qkv": (4096, 6144, "columns"),
    "q": (4096, 4096, "columns"),
    "kv": (4096, 1024, "columns"),
    "o": (4096, 4096, "rows"),
    "gate": (4096, 14336, "columns"),
    "gate_up": (4096, 28672, "columns"),
    "down": (14336, 4096, "rows"),
    "head": (4096, 128256, "columns"),
}
TINY = {name: (i // 64, o // 64, cut) for name, (i, o, cut) in SHAPES.items()}
REPEATS = 20


def measure(*, device: str, tokens: int, steps: int) -> dict[str, Any]:
    """Seconds of every way for every shape, in bfloat16 on CUDA, and the share that is left of the whole's speed."""
    shapes, dtype = (SHAPES, torch.bfloat16) if device == "cuda" else (TINY, torch.float32)
    rows = []
    for t in sorted({max(tokens // 4, 1), tokens, 2 * tokens}):
        for name, (inputs, outputs, cut) in shapes.items():
            x = torch.randn(t, inputs, device=device, dtype=dtype)
            w = torch.randn(inputs, outputs, device=device, dtype=dtype).mul_(inputs**-0.5)
            ways = (by_columns if cut == "columns" else by_rows)(x, w)
            seconds = {way: median_s(run, device=device, rounds=steps) for way, run in ways.items()}
            rows.append(
                {
                    "matrix": name,
                    "tokens": t,
                    "inputs": inputs,
                    "outputs": outputs,
                    "cut": cut,
                    "seconds": seconds,
                    "tflops_whole": 2e-12 * t * inputs * outputs / seconds["whole"],
                    "of_whole": {way: seconds["whole"] / s for way, s in seconds.items()},
                }
            )
    return {"slices": NUM_SLICES, "dtype": str(dtype).removeprefix("torch."), "rows": rows}


def by_columns(x: Tensor, w: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Ways for a weight whose slices are columns; each slice is contiguous, as it is in a ring's slot."""
    y = x.new_empty(x.shape[0], w.shape[1])
    numbers = (NUM_SLICES, NUM_SLICES // 2, NUM_SLICES // 4)
    slices, pairs, fours = ([part.contiguous() for part in w.chunk(n, dim=1)] for n in numbers)
    outs, wide, wider = (y.chunk(n, dim=1) for n in numbers)

    def each(parts: list[Tensor], into: tuple[Tensor, ...]) -> Tensor:
        for part, out in zip(parts, into, strict=True):
            torch.mm(x, part, out=out)
        return y

    def in_turn() -> Tensor:
        with_two_streams([lambda p=p, o=o: torch.mm(x, p, out=o) for p, o in zip(slices, outs, strict=True)], like=x)
        return y

    return {
        "whole": lambda: torch.mm(x, w, out=y),
        "slices": lambda: each(slices, outs),
        "two_streams": in_turn,
        "two_at_once": lambda: each(pairs, wide),
        "four_at_once": lambda: each(fours, wider),
    }


def by_rows(x: Tensor, w: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Ways for a weight whose slices are rows: the input comes in slices too, and outputs add up."""
    y, other = (x.new_empty(x.shape[0], w.shape[1]) for _ in range(2))
    numbers = (NUM_SLICES, NUM_SLICES // 2, NUM_SLICES // 4)
    xs, x_pairs, x_fours = ([part.contiguous() for part in x.chunk(n, dim=1)] for n in numbers)
    slices, pairs, fours = ([part.contiguous() for part in w.chunk(n, dim=0)] for n in numbers)

    def added(inputs: list[Tensor], parts: list[Tensor]) -> Tensor:
        torch.mm(inputs[0], parts[0], out=y)
        for part_x, part in zip(inputs[1:], parts[1:], strict=True):
            y.addmm_(part_x, part)
        return y

    def in_turn() -> Tensor:
        """Each stream adds to an output of its own; the two are added at the end."""
        work = []
        for number, (part_x, part) in enumerate(zip(xs, slices, strict=True)):
            out = (y, other)[number % 2]
            if number < 2:
                work.append(lambda a=part_x, b=part, o=out: torch.mm(a, b, out=o))
            else:
                work.append(lambda a=part_x, b=part, o=out: o.addmm_(a, b))
        with_two_streams(work, like=x)
        return y.add_(other)

    def apart() -> Tensor:
        torch.mm(xs[0], slices[0], out=y)
        for part_x, part in zip(xs[1:], slices[1:], strict=True):
            y.add_(torch.mm(part_x, part, out=other))
        return y

    def unsummed() -> Tensor:
        for part_x, part in zip(xs, slices, strict=True):
            torch.mm(part_x, part, out=y)
        return y

    return {
        "whole": lambda: torch.mm(x, w, out=y),
        "slices": lambda: added(xs, slices),
        "two_streams": in_turn,
        "two_at_once": lambda: added(x_pairs, pairs),
        "four_at_once": lambda: added(x_fours, fours),
        "apart": apart,
        "unsummed": unsummed,
    }


@cache
def second_stream() -> Any:
    """A stream beside the current one."""
    return torch.cuda.Stream()


def with_two_streams(work: list[Callable[[], Any]], *, like: Tensor) -> None:
    """Runs pieces of work in turn on the current stream and on a second one; on CPU one after another."""
    if like.device.type != "cuda":
        for piece in work:
            piece()
        return
    current, second = torch.cuda.current_stream(), second_stream()
    second.wait_stream(current)
    for number, piece in enumerate(work):
        with torch.cuda.stream(second if number % 2 else current):
            piece()
    current.wait_stream(second)


def median_s(run: Callable[[], Any], *, device: str, rounds: int) -> float:
    """Seconds of one call: the median over rounds of `REPEATS` calls each, after one round that does not count."""
    times = []
    for _ in range(1 + rounds):
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(REPEATS):
                run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e-3 / REPEATS)
        else:
            start_s = time.perf_counter()
            run()
            times.append(time.perf_counter() - start_s)
    return statistics.median(times[1:])
