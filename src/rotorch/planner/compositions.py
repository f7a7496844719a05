"""Layouts that a search tries, as text.

[Note: factorisations]
    Every way to write the number of ranks as replicas x stages x ranks of an innermost strategy, of those that compose.
    Of a mixture, rings and gathered models are tried with whole experts, too. Layouts whose ranks share sequences are
    apart: a search tries them only where whole ones leave nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

MOST_STAGES_OF_ZEROPP = 8
"""Its rows take long to make, and its bubble grows with the stages."""


def compositions(num_ranks: int, *, num_layers: int, wide: int, num_experts: int = 0) -> Iterator[str]:
    """Texts of layouts over all ranks (see [Note: factorisations]).

    Args:
        num_ranks: of the cluster.
        num_layers: of the model; 0: no stages.
        wide: most ranks that share activations or rotate slices.
        num_experts: of the layer that has fewest, if experts can be kept whole.
    """
    if num_ranks == 1:
        yield "single"
        return
    divisors = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
    for stages in (n for n in divisors if n == 1 or n <= num_layers):
        left = num_ranks // stages
        pipeline = [f"pp={stages}"] if stages > 1 else []
        for inside in (n for n in divisors if left % n == 0):
            around = [f"ddp={left // inside}"] if left > inside else []
            if inside == 1:
                for again in ("", "[recompute=block]"):
                    if pipeline:
                        yield ",".join([*around, f"pp={stages}{again}"])
                    else:
                        yield f"ddp={left}{again}"
                continue
            for again in ("", "[recompute=block]"):
                yield ",".join([*around, *pipeline, f"fsdp={inside}{again}"])
                if inside <= num_experts:
                    yield ",".join([*around, *pipeline, f"ep={inside}{again}"])
                if 1 < stages <= MOST_STAGES_OF_ZEROPP:
                    yield ",".join([*around, f"zeropp={stages}x{inside}{again}"])
            if inside <= wide:
                for options in ("[recompute=none]", "", "[recompute=slice]"):
                    yield ",".join([*around, *pipeline, f"rtp={inside}{options}"])
                    if inside <= num_experts:
                        whole = f"{options[:-1]},experts=whole]" if options else "[experts=whole]"
                        yield ",".join([*around, *pipeline, f"rtp={inside}{whole}"])
                yield ",".join([*around, *pipeline, f"megatron={inside}"])
                if around:
                    for again in ("", "[recompute=block]"):
                        shared = [*pipeline, f"fsdp={left // inside}{again}"]
                        yield ",".join([*shared, f"megatron={inside}"])
                        yield ",".join([*shared, f"megatron={inside}[sequence_parallel=true]"])
                for ring in (n for n in divisors if 1 < n <= wide // inside):
                    if (left // inside) % ring == 0:
                        outside = [f"ddp={left // inside // ring}"] if left > inside * ring else []
                        for options in ("[recompute=none]", "", "[recompute=slice]"):
                            yield ",".join([*outside, *pipeline, f"rtp={ring}{options}", f"megatron={inside}"])
                yield ",".join([*around, *pipeline, f"megatron={inside}[sequence_parallel=true]"])
                if not pipeline:
                    yield from (",".join([*around, text]) for text in _grids(inside))


def _grids(num_ranks: int) -> Iterator[str]:
    """Square grids, one or several deep, and rectangles of atp."""
    for side in range(2, num_ranks):
        depth, rest = divmod(num_ranks, side * side)
        if depth and not rest:
            yield f"tesseract={side}x{side}x{depth}" if depth > 1 else f"summa={side}x{side}"
        if num_ranks % side == 0:
            yield f"atp={num_ranks // side}x{side}"


def sharing_sequences(num_ranks: int, *, rows: int, per_node: int) -> Iterator[str]:
    """Texts of layouts whose ranks share sequences: rings and gathered models, over all ranks or those of a node.

    Args:
        num_ranks: of the cluster.
        rows: sequences of a step; as many go to every group of ranks that share one.
        per_node: ranks of a node.
    """
    for context in (c for c in range(2, min(num_ranks, 2 * per_node) + 1) if num_ranks % c == 0):
        if rows % (num_ranks // context):
            continue
        sizes = {size for size in (num_ranks, per_node) if num_ranks % size == 0 and size % context == 0}
        for size in sorted(sizes, reverse=True):
            around = f"ddp={num_ranks // size}," if size < num_ranks else ""
            for exchange in ("", ",exchange=heads"):
                options = f"context={context}{exchange}]"
                if size <= 2 * per_node:
                    yield f"{around}rtp={size}[{options}"
                    yield f"{around}rtp={size}[recompute=slice,{options}"
                yield f"{around}fsdp={size}[{options}"
                yield f"{around}fsdp={size}[recompute=block,{options}"
