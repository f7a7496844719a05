"""Base of all strategies: a frozen set of fields, the mesh axes it needs, and the Layout it gives each unit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict, PositiveInt

from rotorch.core.errors import ConfigError
from rotorch.core.layout import Layout, combine_layouts
from rotorch.core.shared_context import SequenceRanks
from rotorch.core.spec import ModelSpec, Unit, Weight
from rotorch.core.traffic import MicroBatch, Transfer


class Strategy(BaseModel, ABC):
    """One way of spreading a model over ranks. Subclasses live in `strategies/<kind>/plan.py`.

    A strategy never chooses for itself: every decision is a field, which the user or the planner fills in.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: ClassVar[str]
    """Its name in the `--parallel` grammar."""

    held_by: ClassVar[str] = ""
    """Module whose `apply` holds a model for it, if that is not `strategies/<kind>/apply.py`."""

    cuts_weights: ClassVar[bool] = False
    """True if its ranks hold different parts of a weight (then it can be the inside of `ddp`)."""

    gathers_weights: ClassVar[bool] = False
    """True if ranks that share weights have them whole while they compute: all of a module, or of a stage."""

    shares_inside: ClassVar[bool] = False
    """True if its ranks, around another strategy's, share what that one holds: each has a part of it at rest."""

    holds_inside: ClassVar[bool] = False
    """True if it holds the model for such a strategy inside of it, too: it cuts that one's slices once more."""

    slices_visit: ClassVar[bool] = False
    """True if slices of weights visit a rank, which computes with one after another."""

    ranks_alike: ClassVar[bool] = False
    """True if all its ranks hold and send the same of any unit, whatever their position."""

    not_compiled: ClassVar[str] = "it compiles nothing"
    """Reason why `compile=True` is refused; "" if `apply` compiles where `Setup.compiled` asks."""

    not_recorded: ClassVar[str] = "its passes are not recorded as CUDA graphs"
    """Reason why `compile="reduce-overhead"` is refused; "" of rtp, and of what may be around it."""

    size_fields: ClassVar[tuple[str, ...]] = ("size",)
    """The fields of its size, as in `rtp=4`; those of a grid are joined by "x", as in `atp=2x4`."""

    @property
    def gradients_stay(self) -> bool:
        """True if gradients of all weights lie in buffers that are there from step to step."""
        return False

    @property
    @abstractmethod
    def axes(self) -> dict[str, int]:
        """Mesh axes and their sizes, outermost first."""

    @property
    @abstractmethod
    def batch_axes(self) -> tuple[str, ...]:
        """The axes along which ranks see different data: other rows, or (`context_axes`) other tokens."""

    @property
    def feature_axes(self) -> tuple[str, ...]:
        """The axes along which ranks see different features of one batch: activations are cut on their last dim."""
        return ()

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The axes along which ranks see different tokens of one batch, between the modules of a model's layers."""
        return ()

    @property
    def context_axes(self) -> dict[str, int]:
        """Batch axes along which neighbours see different tokens of one batch, with the number that share one."""
        return {}

    @property
    def sequence_ranks(self) -> SequenceRanks:
        """Number of these neighbours, and what they exchange."""
        return SequenceRanks()

    @abstractmethod
    def layout(self, unit: Unit, *, position: int = 0) -> Layout:
        """Bytes of `unit` on the rank at `position` of this strategy's axes."""

    def held(self, unit: Unit, *, layout: Layout, position: int = 0) -> Unit:
        """Returns a unit of the parts of `unit` that the rank at `position` holds, for strategies around this one.

        By default of as many bytes, those of frozen weights apart, in a row each: enough where a strategy around this
        one holds all of it again.

        Args:
            unit: the unit.
            layout: of the unit on this rank.
            position: of the rank on this strategy's axes.
        """
        trained = tuple(weight for weight in unit.weights if weight.trained)
        if len(trained) == len(unit.weights):
            gets_gradients = layout.resident_bytes
        else:
            part = replace(unit, weights=trained)
            gets_gradients = self.layout(part, position=position).resident_bytes if trained else 0
        itemsize = unit.weights[0].itemsize
        rows = ((gets_gradients, True), (layout.resident_bytes - gets_gradients, False))
        weights = (Weight(unit.name, (b // itemsize,), itemsize, trained=learns) for b, learns in rows)
        return replace(unit, weights=tuple(weights))

    def layout_around(self, unit: Unit, *, position: int = 0) -> Layout:
        """Bytes of a unit on the rank at `position`, around a strategy whose ranks hold `unit` (see `held`)."""
        return self.layout(unit, position=position)

    def num_parts(self, unit: Unit) -> int:
        """Parts in which each slice of a unit visits; 1 where slices do not visit, or come whole."""
        return 1

    def keeps_copies(self, unit: Unit) -> bool:
        """True if copies of a unit's weights that passes compute with (`Weight.copy_itemsize`) stay from step to step.

        By default one lies beside each shard. False where weights are gathered, or converted as they visit.
        """
        return True

    def activation_transfers(self, unit: Unit, *, batch: MicroBatch, position: int = 0) -> tuple[Transfer, ...]:
        """Transfers of one micro-batch for `unit` beyond its Layout: activations, for strategies that move them."""
        return ()

    def layout_of(self, spec: ModelSpec, *, batch: MicroBatch | None = None, position: int = 0) -> Layout:
        """Layout of a whole model: those of its units together, and memory that all units share.

        Resident bytes of units and their transfers add up; of transient bytes the largest unit's count, since units
        take turns. A strategy with other memory that units share (slots whose size depends on the batch, a buffer for
        the whole model) overrides this and adds it.

        Args:
            spec: the model, its units as `units_of` gives them.
            batch: one micro-batch, whose activations are counted as well; None leaves them out.
            position: of the rank on this strategy's axes.
        """
        layout = combine_layouts(self.layout(unit, position=position) for unit in spec.units)
        if batch is None:
            return layout
        moved = (self.activation_transfers(unit, batch=batch, position=position) for unit in spec.units)
        return replace(layout, transfers=(*layout.transfers, *(t for transfers in moved for t in transfers)))

    def units_of(self, spec: ModelSpec) -> ModelSpec:
        """The model's units as this strategy holds them."""
        return spec

    def part_of(self, spec: ModelSpec, *, position: int) -> ModelSpec:
        """The units of `spec` that the rank at `position` of this strategy's axes holds or uses."""
        return spec

    @property
    def recomputes_layers(self) -> bool:
        """True if layers keep only their inputs for backward: by default, if a field `recompute` is "block"."""
        return bool(getattr(self, "recompute", "none") == "block")

    def recomputed_layers(self, spec: ModelSpec) -> tuple[str, ...] | None:
        """Names of the layers that keep only their inputs for backward, if `recomputes_layers`; None: all."""
        return None

    @property
    def changes_the_model(self) -> str:
        """Difference of its model from the one on one process, in words; "" for every strategy that is exact.

        `parallelize` warns of it, and `rotorch verify` refuses it.
        """
        return ""

    def check(self, spec: ModelSpec) -> None:
        """Raises `ConfigError` if this strategy cannot hold the model; says which unit and what to write instead."""
        return None

    def on_device(self, device_type: str) -> Self:
        """This strategy with the options set that follow from the device of its ranks, "cpu" or "cuda".

        Raises:
            ConfigError: it cannot work there as its options are.
        """
        self.check_device(device_type)
        return self

    def check_device(self, device_type: str) -> None:
        """Raises `ConfigError` if it cannot work on "cpu" or "cuda": the older form of `on_device`, for one release."""
        return None

    def check_micro_batches(self, number: int) -> None:
        """Raises `ConfigError` if a step cannot consist of so many micro-batches."""
        return None

    def check_around(self, inner: Strategy) -> None:
        """Raises `ConfigError` if `inner`, next to it or deeper inside, does not go with this strategy's options."""
        return None

    def for_batch(
        self, spec: ModelSpec, *, batch: MicroBatch, num_micro_batches: int, inside: Sequence[Strategy] = ()
    ) -> Self:
        """This strategy with the options set that follow from a run's batch.

        Args:
            spec: the model.
            batch: one micro-batch of one rank.
            num_micro_batches: of a step.
            inside: the strategies inside of this one, outermost first.

        Raises:
            ConfigError: options ask for a step that this batch does not allow.
        """
        return self

    def at_precision(self, dtype: str | None) -> Self:
        """This strategy with the options set that follow from the dtype of products ("bfloat16"); None: the weights'.

        Raises:
            ConfigError: an option contradicts it.
        """
        return self

    @property
    def short_for(self) -> str:
        """The strategies, as text, that this one abbreviates; "" for most, which stand for themselves."""
        return ""

    def without_idle_options(self) -> Self:
        """This strategy with options at their defaults that change nothing, given the others."""
        return self

    @property
    def num_ranks(self) -> int:
        size = 1
        for axis_size in self.axes.values():
            size *= axis_size
        return size

    @abstractmethod
    def __str__(self) -> str:
        """The `--parallel` text that parses back to this strategy."""

    def _options_text(self) -> str:
        """The options that are not at their defaults, as `[name=value,...]`; nothing if all are."""
        options = []
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if not field.is_required() and value != field.default:
                options.append(f"{name}={str(value).lower() if isinstance(value, bool) else value}")
        return f"[{','.join(options)}]" if options else ""


def sharing(strategies: Sequence[Strategy]) -> tuple[Strategy, ...]:
    """Returns the strategies, outermost first, whose ranks share what another one inside of them holds."""
    return tuple(strategy for strategy in strategies[:-1] if strategy.shares_inside)


def with_visits(strategies: Sequence[Strategy]) -> Strategy | None:
    """Returns the strategy under which slices visit a rank, innermost or around the innermost one; None without one."""
    return next((s for s in (*sharing(strategies), *strategies[-1:]) if s.slices_visit), None)


class OneAxis(Strategy):
    """A strategy of `size` ranks along one axis, which has the name of its kind; by default each has its own batch."""

    size: PositiveInt

    @property
    def axes(self) -> dict[str, int]:
        return {self.kind: self.size}

    @property
    def batch_axes(self) -> tuple[str, ...]:
        return (self.kind,)

    def _check_cut(self, spec: ModelSpec) -> None:
        """Raises `ConfigError` unless every rank can hold a slice of some weight."""
        if self.size > 1 and not spec.cut_units:
            raise ConfigError(
                f"{self.kind}: nothing to cut in {spec.name}: no weight has a role in its tensor-parallel plan. "
                "Write plan={...} with roles for its weights, or use ddp or fsdp"
            )
        if self.size > (most := spec.finest_cut):
            raise ConfigError(
                f"{self.kind}: {self.size} ranks over {spec.name}, whose finest cut has {most} groups: "
                f"ranks would hold nothing. Write {self.kind}={most} or less"
            )

    def __str__(self) -> str:
        return f"{self.kind}={self.size}{self._options_text()}"
