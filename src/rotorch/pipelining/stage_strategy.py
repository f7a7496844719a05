"""Base of `pp` and `zeropp`: a model cut between layers, or inside, into stages that micro-batches pass."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any, ClassVar, Self

from pydantic import ByteSize, PositiveInt, TypeAdapter, ValidationError, model_validator

from rotorch.core.errors import ConfigError
from rotorch.core.layout import Layout
from rotorch.core.spec import ModelSpec, Unit
from rotorch.core.stage_balance import LayerCost, balanced, balanced_within, layer_costs
from rotorch.core.stages import (
    check_stages,
    of_stages,
    places_of,
    stage_layout,
    stage_transfers,
    whole_layers,
    with_stages,
)
from rotorch.core.strategy import Strategy
from rotorch.core.traffic import MicroBatch, Transfer
from rotorch.pipelining.actions import ActionKind, Placement, Schedule


class StageStrategy(Strategy):
    """Stages of a model over `stages` ranks, run by a table of actions, which subclasses make.

    Attributes:
        stages: number of ranks that a micro-batch passes.
        chunks: stages that each rank holds; left out: the table's usual number.
        unit: micro-batches that share a gather of weights and a sum of gradients, where weights are gathered at all.
        layers: number of layers of each stage, in order, written `3-5-4`, or `2.5-5-4.5`, where stages end between a
            layer's attention and what follows it; left out: numbers that make the slowest stage as fast as possible
            (core/stage_balance.py).
        halves: choose numbers of half layers, if they are left out.
        rank_memory: limit of a rank's memory, written `2GiB`: layers are distributed within it, by the batch of a run.
        recompute: layers that are computed again in backward from their inputs (activation checkpointing): `none`, all
            (`block`), numbers of each stage's first layers, in order, written `2-1-0-0`, or `auto`: as few as
            `rank_memory` takes.
    """

    cuts_weights: ClassVar[bool] = True
    stage_axis: ClassVar[str]
    """The axis of the mesh along which micro-batches pass."""

    stages: PositiveInt
    chunks: PositiveInt | None = None
    unit: PositiveInt | None = None
    layers: str | None = None
    halves: bool = False
    rank_memory: str | None = None
    recompute: str = "none"

    @model_validator(mode="after")
    def _recompute_is_known(self) -> Self:
        told = f"{self.kind}: recompute={self.recompute}"
        if self.recompute in ("none", "block"):
            return self
        if self.recompute == "auto":
            if self.rank_memory is None:
                raise ConfigError(
                    f"{told}: as few layers are computed again as a limit of memory takes, and there is none. Write "
                    "rank_memory=2GiB beside it, or recompute=block"
                )
            if self.splits_backward:
                raise ConfigError(
                    f"{told}: weight gradients that are put off keep what they need until they are made, so computing "
                    "it again saves little. Write recompute=none, or pp=... with schedule=1f1b"
                )
            return self
        if not re.fullmatch(r"(0|[1-9][0-9]{0,6})(-(0|[1-9][0-9]{0,6}))*", self.recompute):
            raise ConfigError(
                f"{told}: no layers that are computed again. Write none, block, auto, or a number of layers for each "
                "stage, for example recompute=2-1-0-0"
            )
        self._check_one_each(self._recompute_counts, told=told)
        if self.rank_memory is not None:
            raise ConfigError(
                f"{told} counts layers of stages, and rank_memory={self.rank_memory} decides what these are. Write "
                "recompute=auto, or layers=... in the place of rank_memory"
            )
        return self

    def _check_one_each(self, numbers: Sequence[int], *, told: str) -> None:
        """Raises `ConfigError` unless there is a number for each stage; `told`: the option as it is written."""
        if len(numbers) != self.num_stages:
            raise ConfigError(
                f"{told} are {len(numbers)} stages, but there are {self.num_stages} (ranks times chunks). Write "
                f"{self.num_stages} numbers"
            )

    @property
    def _recompute_counts(self) -> list[int]:
        return [int(number) for number in self.recompute.split("-")]

    @property
    def recomputes_layers(self) -> bool:
        """True if some layers keep only their inputs for backward."""
        return self.recompute == "block" or self.recomputes_some

    @property
    def recomputes_some(self) -> bool:
        """True if `recompute` has numbers of layers, and not all of them are 0."""
        return self.recompute not in ("none", "block", "auto") and any(self._recompute_counts)

    def recomputed(self, stage: int, *, part: range) -> range:
        """The layers of a stage that are computed again in backward; `part` are all of which it has both halves."""
        if self.recompute == "block":
            return part
        return part[: self._recompute_counts[stage]] if self.recomputes_some else part[:0]

    def recomputed_layers(self, spec: ModelSpec) -> tuple[str, ...] | None:
        if not (self.recomputes_some or self.cuts_inside):
            return None
        parts = map(whole_layers, self.places_of(spec))
        each = (self.recomputed(stage, part=part) for stage, part in enumerate(parts))
        return tuple(spec.order.layers[number] for layers in each for number in layers)

    @model_validator(mode="after")
    def _layers_are_numbers(self) -> Self:
        if self.layers is None:
            return self
        number = r"([1-9][0-9]{0,6}(\.5)?|0\.5)"
        if not re.fullmatch(rf"{number}(-{number})*", self.layers):
            raise ConfigError(
                f"{self.kind}: layers={self.layers}: no number of layers for each stage. Write for example layers=3-5 "
                "or layers=2.5-5.5"
            )
        self._check_one_each(self._place_counts, told=f"{self.kind}: layers={self.layers}")
        if self.halves:
            raise ConfigError(
                f"{self.kind}: layers={self.layers} distributes the layers, and halves=true asks for it. Leave one of "
                "the two out"
            )
        return self

    @model_validator(mode="after")
    def _memory_is_a_number_of_bytes(self) -> Self:
        if self.rank_memory is None:
            return self
        if self.layers is not None:
            raise ConfigError(
                f"{self.kind}: layers={self.layers} distributes the layers, and rank_memory={self.rank_memory} asks "
                "for it. Leave one of the two out"
            )
        try:
            is_some = self._rank_memory_bytes > 0
        except ValidationError:
            is_some = False
        if not is_some:
            raise ConfigError(
                f"{self.kind}: rank_memory={self.rank_memory}: no number of bytes above 0. Write for example "
                "rank_memory=2GiB"
            )
        return self

    @property
    def _rank_memory_bytes(self) -> int:
        return TypeAdapter(ByteSize).validate_python(self.rank_memory)

    @property
    def _place_counts(self) -> list[int]:
        """Numbers of half layers of each stage."""
        return [int(2 * float(number)) for number in (self.layers or "").split("-")]

    @property
    def cuts_inside(self) -> bool:
        """True if stages may end inside of layers."""
        return self.halves or (self.layers is not None and "." in self.layers)

    @abstractmethod
    def table(self, num_micro_batches: int) -> Schedule:
        """Returns the table of all ranks' computations in a step of `num_micro_batches`.

        Raises:
            ConfigError: a step cannot consist of so many.
        """

    @property
    @abstractmethod
    def splits_backward(self) -> bool:
        """True if the table computes weight gradients apart from those of inputs."""

    def unit_of(self, num_micro_batches: int) -> int:
        """Micro-batches of a step that share a gather of weights and a sum of gradients, where weights are gathered."""
        return min(self.unit or num_micro_batches, num_micro_batches)

    @property
    def num_chunks(self) -> int:
        """Stages that each rank holds."""
        return self.chunks or 1

    @property
    def ranks_per_stage(self) -> int:
        """Number of ranks that share each stage without another strategy's help."""
        return 1

    @property
    def num_stages(self) -> int:
        """Number of stages of the whole pipeline."""
        return self.stages * self.num_chunks

    @property
    def placement(self) -> Placement:
        """Distribution of stages over ranks."""
        return Placement.LOOP

    def rank_of(self, stage: int) -> int:
        """The rank that holds a stage, among the ranks that a micro-batch passes."""
        return self.placement.rank_of(stage, num_ranks=self.stages)

    @property
    def stages_by_rank(self) -> list[tuple[int, ...]]:
        """The stages that each rank holds, of the ranks that a micro-batch passes, in the order of the model."""
        found: list[list[int]] = [[] for _ in range(self.stages)]
        for stage in range(self.num_stages):
            found[self.rank_of(stage)].append(stage)
        return [tuple(mine) for mine in found]

    def places_of(self, spec: ModelSpec) -> tuple[range, ...]:
        """The half layers of each stage, by number (`LayerOrder.place_number`)."""
        if self.layers is not None:
            ends = accumulate(self._place_counts, initial=0)
            return tuple(range(start, end) for start, end in pairwise(ends))
        parts = balanced(layer_costs(spec, halves=self.halves), kept=[1] * self.num_stages, halves=self.halves)
        return parts if self.halves else places_of(parts)

    def parts_of(self, spec: ModelSpec) -> tuple[range, ...]:
        """The layers of each stage.

        Raises:
            ConfigError: a stage ends inside of a layer.
        """
        places = self.places_of(spec)
        if any(part.stop % 2 for part in places):
            raise ConfigError(
                f"{self}: stages end inside of layers, of which there are no plans. Write whole numbers of layers, or "
                "measure it by rotorch bench"
            )
        return tuple(map(whole_layers, places))

    def kept_by_stages(self, num_micro_batches: int) -> tuple[int, ...]:
        """Per stage, the most micro-batches that are between its forward and their last gradient at a time."""
        most = [0] * self.num_stages
        for stages, moments in zip(self.stages_by_rank, self.kept_together(num_micro_batches), strict=True):
            for place, stage in enumerate(stages):
                most[stage] = max(sum(moment[place]) for moment in moments)
        return tuple(most)

    def kept_together(self, num_micro_batches: int) -> tuple[tuple[tuple[tuple[int, int], ...], ...], ...]:
        """Per rank, the numbers of micro-batches that its stages keep at the same time, of each moment of a step.

        Of each stage two: those before their backward, and those behind it of which weight gradients are to come.
        """
        found = []
        for stages, row in zip(self.stages_by_rank, self.table(num_micro_batches).rows, strict=True):
            now = {stage: (0, 0) for stage in stages}
            seen: dict[tuple[tuple[int, int], ...], None] = {}
            for action in row:
                whole, put_off = now[action.stage]
                match action.kind:
                    case ActionKind.FORWARD:
                        whole += 1
                    case ActionKind.BACKWARD:
                        whole -= 1
                    case ActionKind.BACKWARD_INPUT:
                        whole, put_off = whole - 1, put_off + 1
                    case ActionKind.BACKWARD_WEIGHT:
                        put_off -= 1
                now[action.stage] = whole, put_off
                seen[tuple(now.values())] = None
            found.append(tuple(seen))
        return tuple(found)

    def balanced(
        self,
        spec: ModelSpec,
        *,
        batch: MicroBatch,
        num_micro_batches: int,
        limit_bytes: float | None = None,
        inside: Sequence[Strategy] = (),
        costs: Sequence[LayerCost] | None = None,
    ) -> Self:
        """The same strategy with the best numbers of layers for a batch written out (core/stage_balance.py).

        Args:
            spec: the model.
            batch: one micro-batch of one rank.
            num_micro_batches: of a step.
            limit_bytes: of a rank's memory, with gradients, AdamW and activations; each of its chunks gets an equal
                part of it. None: no limit.
            inside: the strategies that hold the stages, outermost first; none: this one does.
            costs: of the layers, or of half layers with `halves`; by default estimates.

        Raises:
            ConfigError: the model cannot be cut, or no cut keeps to the limit.
        """
        self._check_layers(spec)
        holding = tuple(inside) or (self,)
        if costs is None:
            again = any(strategy.recomputes_layers for strategy in holding)
            costs = layer_costs(spec, batch=batch, recompute=again, halves=self.halves)
        how: dict[str, Any] = {
            "kept": self.kept_by_stages(num_micro_batches),
            "shared_by": self.ranks_per_stage
            * prod(strategy.num_ranks for strategy in inside if strategy.cuts_weights),
            "gathered": self._gathered(holding),
        }
        limit = None if limit_bytes is None else limit_bytes / self.num_chunks
        recompute = self.recompute
        if recompute == "auto":
            assert limit is not None
            parts, numbers = balanced_within(costs, limit_bytes=limit, halves=self.halves, **how)
            recompute = "-".join(map(str, numbers)) if any(numbers) else "none"
        else:
            parts = balanced(costs, limit_bytes=limit, halves=self.halves, **how)
        chosen = {"layers": written(parts, halves=self.halves), "halves": False}
        return self.model_copy(update={**chosen, "recompute": recompute, "rank_memory": None})

    def _gathered(self, holding: Sequence[Strategy]) -> float:
        """Fraction of a rank's stages that is there while a stage is gathered, of several one at a time."""
        gathers = next((number for number, strategy in enumerate(holding) if strategy.gathers_weights), None)
        if gathers is None:
            return 0.0
        return 1 / (self.num_chunks * prod(strategy.num_ranks for strategy in holding[gathers + 1 :]))

    def for_batch(
        self,
        spec: ModelSpec,
        *,
        batch: MicroBatch,
        num_micro_batches: int,
        inside: Sequence[Strategy] = (),
        costs: Callable[[], Sequence[LayerCost] | None] | None = None,
    ) -> Self:
        if self.rank_memory is None:
            return self
        try:
            return self.balanced(
                spec,
                batch=batch,
                num_micro_batches=num_micro_batches,
                limit_bytes=self._rank_memory_bytes,
                inside=inside,
                costs=None if costs is None else costs(),
            )
        except ConfigError as error:
            told = str(error)
            raise ConfigError(told if told.startswith(str(self)) else f"{self}: {told}") from None

    def units_of(self, spec: ModelSpec) -> ModelSpec:
        self.check(spec)
        return with_stages(spec, places=self.places_of(spec))

    def part_of(self, spec: ModelSpec, *, position: int) -> ModelSpec:
        mine = position // self.ranks_per_stage
        return of_stages(spec, mine=lambda stage: self.rank_of(stage) == mine)

    def layout(self, unit: Unit, *, position: int = 0) -> Layout:
        return stage_layout(unit, position=position // self.ranks_per_stage, rank_of=self.rank_of, axis=self.stage_axis)

    def activation_transfers(self, unit: Unit, *, batch: MicroBatch, position: int = 0) -> tuple[Transfer, ...]:
        return stage_transfers(
            unit,
            batch=batch,
            position=position // self.ranks_per_stage,
            num_stages=self.num_stages,
            rank_of=self.rank_of,
            axis=self.stage_axis,
        )

    def check_micro_batches(self, number: int) -> None:
        self.table(number)

    def check(self, spec: ModelSpec) -> None:
        if self.rank_memory is not None:
            raise ConfigError(
                f"{self}: the memory of a stage depends on the batch, which only a run has. Write layers=..., as "
                "`rotorch train RUN.toml --dry-run` with this layout prints them"
            )
        self._check_layers(spec)

    def _check_layers(self, spec: ModelSpec) -> None:
        check_stages(spec, num_stages=self.num_stages, strategy=str(self), inside=self.cuts_inside)
        there, order = len(spec.order.layers), spec.order
        if self.cuts_inside and not order.halves:
            why = order.not_in_halves or "no tiny model of its kind was tried, which is so of models with adapters"
            raise ConfigError(
                f"{self}: layers of {spec.name} cannot be cut inside: {why}. Write whole numbers of layers"
            )
        if self.layers is not None and sum(self._place_counts) != order.num_places:
            raise ConfigError(
                f"{self}: {sum(self._place_counts) / 2:g} layers over {spec.name}, which has {there}. Write numbers "
                f"that add up to {there}, or leave layers out"
            )
        if self.recomputes_some:
            for stage, part in enumerate(map(whole_layers, self.places_of(spec))):
                if (number := self._recompute_counts[stage]) > len(part):
                    raise ConfigError(
                        f"{self}: recompute={self.recompute} computes {number} layers of stage {stage} again, which "
                        f"has {len(part)} whole ones of {there}. Write at most {len(part)}"
                    )

    def check_around(self, inner: Strategy) -> None:
        if self.cuts_inside and (inner.token_axes or inner.context_axes):
            raise ConfigError(
                f"{self} around {inner}: layers whose tokens are cut stay whole. Write whole numbers of layers"
            )
        if self.cuts_inside and getattr(inner, "recompute", "none") == "block":
            raise ConfigError(
                f"{self} around {inner}: a layer of which a stage has one half cannot be computed again. Write whole "
                "numbers of layers, or recompute=none"
            )
        if getattr(inner, "memory", None) is not None:
            raise ConfigError(
                f"{self} around {inner}: units are chosen to be whole over a whole model, and a rank has some of its "
                "stages. Leave memory out"
            )
        if self.recompute != "none":
            raise ConfigError(
                f"{self} around {inner}: the strategy that holds the stages decides on recomputation. "
                f"Write {self._size_text()},{inner.kind}=..[recompute=...]"
            )

    def _size_text(self) -> str:
        return f"{self.kind}={'x'.join(str(getattr(self, field)) for field in self.size_fields)}"

    def __str__(self) -> str:
        return f"{self._size_text()}{self._options_text()}"


def written(parts: Sequence[range], *, halves: bool) -> str:
    """Numbers of layers as `layers` takes them; `halves`: of parts in half layers."""
    return "-".join(f"{len(part) / 2:g}" if halves else str(len(part)) for part in parts)
