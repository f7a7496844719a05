"""Parts of a step on a GPU, each by itself: weight gradients, attention, copies beside products, the host's calls.

See gpu.py. What each is for:

    weight_gradients  a linear layer's weight gradient in float32 from bfloat16 factors, in 1 to 8 slices: "widened" by
                      one product with a wider sum (`out_dtype`), or "copied" from a product in bfloat16
    attention         causal attention of 32, 16, 8 and 4 heads of a layer, forward and backward: in one visit, and in
                      2 (as by default between GPUs), 4 and 8
    beside            products alone, and while another stream copies, converts (which takes multiprocessors), or waits
                      in a kernel all the time: `of_alone` is time alone over time beside
    host              microseconds of the host per call: a product, a small kernel, events, streams, signals
    first_values      seconds of `materialize` for a rank of 8 with weights on the device, and on the CPU (which draws
                      the numbers of both), and the share of them that are the same in bfloat16
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from gpu_rank import LLAMA_3_8B, NUM_RANKS, TINY
from gpu_slices import median_s
from torch import Tensor
from torch.nn import functional as F

import rotorch
from rotorch.models.hf import causal_lm, config_from_dict
from rotorch.ops.running_sum import add_product, widens
from rotorch.testing.fake import as_rank

HEADS = (32, 16, 8, 4)
VISITS = (1, 2, 4, 8)
HEAD_DIM = 128
PER_KEY_HEAD = 4
_CALLS = 200


def measure(*, device: str, tokens: int, steps: int) -> dict[str, Any]:
    """All parts, in the shapes of Llama-3-8B on CUDA and of a tiny model on CPU."""
    shapes = LLAMA_3_8B if device == "cuda" else TINY
    given = {"device": device, "tokens": tokens, "rounds": steps}
    return {
        "weight_gradients": weight_gradients(shapes, **given),
        "attention": attention(**given),
        "beside": beside(shapes, **given),
        "host": host(device=device, rounds=steps),
        "first_values": first_values({**shapes, "num_hidden_layers": 2}, device=device),
    }


def weight_gradients(shapes: dict[str, Any], *, device: str, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Seconds for the gradient of an MLP's first weight, added to what is there."""
    inputs, outputs, half = shapes["hidden_size"], shapes["intermediate_size"], torch.bfloat16
    x, grad = (torch.randn(tokens, size, device=device).to(half) for size in (inputs, outputs))
    sums = torch.zeros(outputs, inputs, device=device)

    def widened(visits: int) -> None:
        for part, of_grad in zip(sums.chunk(visits), grad.chunk(visits, dim=1), strict=True):
            add_product(part, of_grad.t(), x, fresh=False)

    def copied(visits: int) -> None:
        for part, of_grad in zip(sums.chunk(visits), grad.chunk(visits, dim=1), strict=True):
            part.add_(of_grad.t() @ x)

    ways = {"copied": copied, **({"widened": widened} if widens(sums, grad) else {})}
    return [
        {
            "visits": visits,
            "tokens": tokens,
            "seconds": {
                name: median_s(lambda way=way, visits=visits: way(visits), device=device, rounds=rounds)
                for name, way in ways.items()
            },
        }
        for visits in VISITS
    ]


def attention(*, device: str, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Seconds of torch's attention for some heads, and its speed per head, of that of all heads together."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    rows: list[dict[str, Any]] = []
    for heads in HEADS:
        shapes = [(1, number, tokens, HEAD_DIM) for number in (heads, heads // PER_KEY_HEAD, heads // PER_KEY_HEAD)]
        queries, keys, values = (torch.randn(shape, device=device, dtype=dtype).requires_grad_() for shape in shapes)

        def run(queries: Tensor = queries, keys: Tensor = keys, values: Tensor = values) -> None:
            out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
            torch.autograd.grad(out, (queries, keys, values), torch.ones_like(out))

        seconds = median_s(run, device=device, rounds=rounds)
        whole = rows[0]["seconds"] if rows else seconds
        rows.append(
            {"heads": heads, "tokens": tokens, "seconds": seconds, "of_all": whole / seconds * heads / HEADS[0]}
        )
    return rows


def beside(shapes: dict[str, Any], *, device: str, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Time of a row of products while another stream works without a pause; on CPU only that of the products alone."""
    size, half = shapes["hidden_size"], torch.bfloat16
    x, w = torch.randn(tokens, size, device=device).to(half), torch.randn(size, size, device=device).to(half)
    out = torch.empty(tokens, size, device=device, dtype=half)
    source = torch.randn(4 * size * size, device=device)
    same, converted = torch.empty_like(source), torch.empty_like(source, dtype=half)

    def products() -> None:
        for _ in range(8):
            torch.mm(x, w, out=out)

    alone = median_s(products, device=device, rounds=rounds)
    rows = [{"way": "alone", "tokens": tokens, "seconds": alone, "of_alone": 1.0}]
    if device != "cuda":
        return rows
    works: dict[str, Callable[[], Any]] = {
        "copy": lambda: same.copy_(source, non_blocking=True),
        "converting copy": lambda: converted.copy_(source),
        # One block that spins, as a wait for a signal does; torch has no public one.
        "spinning wait": lambda: torch.cuda._sleep(1_000_000),
    }
    for name, work in works.items():
        each = median_s(work, device=device, rounds=rounds)
        number = 2 + int(3 * alone / each)  # longer than the products take
        seconds = statistics.median(during(products, work, number=number) for _ in range(rounds))
        rows.append({"way": name, "tokens": tokens, "seconds": seconds, "of_alone": alone / seconds})
    return rows


def during(run: Callable[[], Any], work: Callable[[], Any], *, number: int) -> float:
    """Seconds of `run` on the current stream, while another one does `number` pieces of work."""
    current, second = torch.cuda.current_stream(), torch.cuda.Stream(priority=-1)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    second.wait_stream(current)
    with torch.cuda.stream(second):
        for _ in range(number):
            work()
    start.record()
    run()
    end.record()
    current.wait_stream(second)
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e-3


def host(*, device: str, rounds: int) -> list[dict[str, Any]]:
    """Microseconds that the host takes to give the device one call, of some kinds."""
    small, other = torch.zeros(2, 64, 64, device=device)
    calls: dict[str, Callable[[], Any]] = {
        "product": lambda: torch.mm(small, small),
        "small kernel": lambda: small.add_(1),
        "copy": lambda: other.copy_(small),
    }
    if device == "cuda":
        stream, event = torch.cuda.Stream(), torch.cuda.Event()
        current = torch.cuda.current_stream()

        def entered() -> None:
            with torch.cuda.stream(stream):
                pass

        calls |= {
            "new event": current.record_event,
            "event again": lambda: event.record(current),
            "wait for an event": lambda: current.wait_event(event),
            "stream entered": entered,
        }
    with signals(device) as handle:
        if handle is not None:
            # To itself, taken at once: the next one finds the flag as it was.
            calls["signal and wait"] = lambda: (handle.put_signal(0, 1), handle.wait_signal(0, 1))
        return [
            {"call": name, "microseconds": 1e6 * seconds_of_host(call, device=device, rounds=rounds)}
            for name, call in calls.items()
        ]


@contextmanager
def signals(device: str) -> Iterator[Any]:
    """Signal pad of symmetric memory in a group of this process alone; None where there is none."""
    from rotorch._torch_private import symmetric_empty, symmetric_rendezvous
    from rotorch.comm.transports.peer_memory import why_no_windows

    if why_no_windows(torch.device(device)):
        yield None
        return
    on = torch.device(device, torch.cuda.current_device())
    with as_group_of_one():
        window = symmetric_empty(256, dtype=torch.float32, device=on)  # there as long as the handle is used
        yield symmetric_rendezvous(window, torch.distributed.group.WORLD)
        del window


@contextmanager
def as_group_of_one() -> Iterator[None]:
    """A process group of this process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def seconds_of_host(call: Callable[[], Any], *, device: str, rounds: int) -> float:
    """Seconds of one call until it is given; the device is done with all before a round begins."""
    times = []
    for _ in range(1 + rounds):
        if device == "cuda":
            torch.cuda.synchronize()
        start_s = time.perf_counter()
        for _ in range(_CALLS):
            call()
        times.append((time.perf_counter() - start_s) / _CALLS)
    return statistics.median(times[1:])


def first_values(shapes: dict[str, Any], *, device: str) -> list[dict[str, Any]]:
    """Seconds in which a rank of 8 makes its first values, and whether they are the same on each device."""
    rows: list[dict[str, Any]] = []
    on_cpu: list[Tensor] = []
    for on in dict.fromkeys(("cpu", device)):
        with as_rank(3, num_ranks=NUM_RANKS):
            with rotorch.on_meta():
                module = causal_lm(config_from_dict(shapes, source=__file__))
            model = rotorch.parallelize(module, f"fsdp={NUM_RANKS}", device=on)
            model.materialize(seed=0)  # memory and kernels are there from now on
            start_s = time.perf_counter()
            model.materialize(seed=1)
            if on == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start_s
            made = [
                held.local.detach().to("cpu", torch.bfloat16, copy=True).flatten() for held in model.weights.values()
            ]
            model.close()
        on_cpu = on_cpu or made
        same = sum(int((a == b).sum()) for a, b in zip(made, on_cpu, strict=True))
        numbers = sum(each.numel() for each in made)
        rows.append({"device": on, "numbers": numbers, "seconds": seconds, "same_in_bfloat16": same / max(numbers, 1)})
    return rows
