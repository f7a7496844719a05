"""The training loop. It knows a `ParallelModel`, batches, and listeners; not how the model is spread over ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType

from rotorch.core.errors import FinalFailure
from rotorch.parallel_model import Batch, ParallelModel
from rotorch.run_config import BatchSizes, RunConfig
from rotorch.run_data import HELD_OUT
from rotorch.train.checkpoint.async_save import Saver
from rotorch.train.checkpoint.directories import latest
from rotorch.train.checkpoint.store import AnyPath, as_path
from rotorch.train.checks.divergence import DivergenceGuard, read_ahead, recent_losses
from rotorch.train.checks.memory import PeakMeter, TensorBytes, is_noted, memory_of_ranks, tensor_bytes
from rotorch.train.checks.nonfinite import first_nonfinite
from rotorch.train.checks.replicas import Sums, check_replicas, check_unchanged
from rotorch.train.data.batches import TokenWindows, bits_per_byte
from rotorch.train.data.stream import STREAM
from rotorch.train.early_stop import EarlyStop
from rotorch.train.launch.status import RankPhase, StatusBoard
from rotorch.train.metrics import HeldOut, Listener, StepRecord
from rotorch.train.optim import learning_rate
from rotorch.train.state import TrainState
from rotorch.train.step import StepResult, rewards_of, train_step


@dataclass(frozen=True)
class LoopEnd:
    """Result of the training loop.

    Attributes:
        held_out: the last evaluation, None if there was none.
        checkpoint: the last checkpoint.
        stopped: True if it was asked to stop before its end.
        tensors: tensors of this rank after its last step.
        peak_bytes: the most memory each rank took, by rank.
        evals: the last evaluation of each text of `train.eval`, by name.
        ended_early: the reason, if the run's patience ended it before the last step.
    """

    held_out: HeldOut | None
    checkpoint: AnyPath
    stopped: bool
    tensors: TensorBytes
    peak_bytes: tuple[int, ...]
    evals: Mapping[str, HeldOut] = field(default_factory=dict)
    ended_early: str = ""


def run_loop(
    state: TrainState,
    *,
    config: RunConfig,
    sizes: BatchSizes,
    windows: TokenWindows,
    held_out: TokenWindows,
    saves_in: AnyPath,
    listeners: Sequence[Listener],
    board: StatusBoard,
    evals: Mapping[str, TokenWindows] = MappingProxyType({}),
    phase: Callable[[str], None] = lambda text: None,
) -> LoopEnd:
    """Trains from `state.step` to the last step, or to where all ranks agree to stop. All ranks.

    Evaluates every `eval_every` steps and after the last; saves every `checkpoint_every` steps, after the last, and on
    stopping.

    Args:
        state: model, optimizer and counters; its step and tokens move on.
        config: the run.
        sizes: of the batch.
        windows: windows to train on.
        held_out: windows to evaluate on; may be empty.
        saves_in: directory or store of its checkpoints.
        listeners: are told of every step; rank 0's only.
        board: board on which this rank notes its activity.
        evals: further windows to evaluate on, by name.
        phase: is told what goes on between two steps.
    """
    model, optimizer, train = state.model, state.optimizer, config.train
    assert optimizer is not None, "training needs one"
    peak = PeakMeter(model.device, uncounted_bytes=model.sharded.uncounted_bytes)
    guard = DivergenceGuard(train, losses=recent_losses(state))
    patience = EarlyStop(train, state=state)
    measured: HeldOut | None = None
    by_name: dict[str, HeldOut] = {}
    checkpoint = saves_in
    at_rest: Sums | None = None
    first_step = state.step + 1

    if train.steps <= state.step or patience.reason_to_end():  # what came after the last step failed
        return _over(state, config=config, held_out=held_out, evals=evals, sizes=sizes, patience=patience)

    def examine() -> None:
        if at_rest is not None:
            board.doing(RankPhase.EXAMINING)
            check_unchanged(state, at_rest)

    with Saver(saves_in, keep=train.keep, behind=train.async_save, mesh=model.mesh) as saver:
        while True:
            start_s = time.perf_counter()
            step = state.step + 1
            board.doing(RankPhase.READING, step=step)
            batches = read_batches(windows, model, step=step + read_ahead(state), sizes=sizes)
            lr = learning_rate(step, settings=config.optimizer, steps=train.steps)
            result = train_step(
                model,
                optimizer,
                batches=batches,
                lr=lr,
                clip_norm=config.optimizer.clip_norm,
                highest_loss=guard.highest_loss,
                peak=peak,
                board=board,
                examine=examine,
            )
            at_rest = None
            step_s = time.perf_counter() - start_s
            saver.check()
            if result.updated:
                guard.done(result.loss)
            else:
                board.doing(RankPhase.SAVING)  # it waits for what is written behind it, which may take long
                saver.wait()
                board.doing(RankPhase.EXAMINING)
                if _went_back(
                    state,
                    result,
                    config=config,
                    guard=guard,
                    step=step,
                    lr=lr,
                    batches=batches,
                    saves_in=saves_in,
                    listeners=listeners,
                    board=board,
                ):
                    patience.read_from(state)
                    continue
            num_tokens = sizes.global_batch * windows.tokens_per_window
            state.step = step
            state.tokens += num_tokens if result.updated else 0

            is_last = step == train.steps
            now_measured, now_by_name, ends = None, {}, ""
            if is_last or _is_due(step, every=train.eval_every):
                board.doing(RankPhase.EVALUATING)
                phase("evaluating")
                rows, most = sizes.micro_batch, train.eval_windows
                if len(held_out):
                    now_measured = measured = evaluate(model, held_out, micro_batch=rows, max_windows=most)
                now_by_name = by_name = {
                    name: evaluate(model, text, micro_batch=rows, max_windows=most) for name, text in evals.items()
                }
                ends = patience.measured(step, held_out=now_measured, evals=now_by_name)
            memory = None
            if is_noted(step, first=first_step, steps=train.steps):
                memory = {**memory_of_ranks(model, asdict(tensor_bytes(model, optimizer))), "peak": result.peak_bytes}
            record = StepRecord(
                step=step,
                loss=result.loss,
                tokens=state.tokens,
                tokens_per_s=num_tokens / step_s,
                grad_norm=result.grad_norm,
                lr=lr,
                peak_bytes=max(result.peak_bytes),
                step_s=step_s,
                held_out=now_measured,
                evals=now_by_name,
                skipped=not result.updated,
                memory=memory,
                rewards=result.rewards,
            )
            for listener in listeners:
                listener.on_step(record)
            if result.stop and not (is_last or ends):
                _tell(listeners, f"asked to stop: writing a checkpoint after step {step}")
            if ends and not is_last:
                _tell(listeners, f"ending after step {step}: {ends}")
            is_over = is_last or result.stop or bool(ends)
            is_saving = is_over or _is_due(step, every=train.checkpoint_every)
            if train.check_every and (is_saving or _is_due(step, every=train.check_every)):
                board.doing(RankPhase.EXAMINING)
                at_rest = check_replicas(state)
            if is_saving:
                board.doing(RankPhase.SAVING)
                phase("saving a checkpoint")
                guard.remember_in(state)
                patience.remember_in(state)
                if (place := windows.position((step + read_ahead(state)) * sizes.global_batch)) is not None:
                    state.data = {**state.data, STREAM: place}
                checkpoint = saver.save(state)
                guard.saved()
            if is_over:
                return LoopEnd(
                    measured,
                    checkpoint,
                    stopped=not (is_last or ends),
                    tensors=tensor_bytes(model, optimizer),
                    peak_bytes=result.peak_bytes,
                    evals=by_name,
                    ended_early="" if is_last else ends,
                )


def _over(
    state: TrainState,
    *,
    config: RunConfig,
    held_out: TokenWindows,
    evals: Mapping[str, TokenWindows],
    sizes: BatchSizes,
    patience: EarlyStop,
) -> LoopEnd:
    """The end of a run whose last step was done before it was started again: measured once more, and not saved."""
    model, most = state.model, config.train.eval_windows
    found = {
        name: evaluate(model, text, micro_batch=sizes.micro_batch, max_windows=most)
        for name, text in {HELD_OUT: held_out, **evals}.items()
        if len(text)
    }
    checkpoint = latest(as_path(config.train.saves_in))
    assert checkpoint is not None, "it was loaded"
    return LoopEnd(
        found.pop(HELD_OUT, None),
        checkpoint,
        stopped=False,
        tensors=tensor_bytes(model, state.optimizer),
        peak_bytes=(0,) * model.mesh.size(),
        evals=found,
        ended_early="" if state.step >= config.train.steps else patience.reason_to_end(),
    )


def _went_back(
    state: TrainState,
    result: StepResult,
    *,
    config: RunConfig,
    guard: DivergenceGuard,
    step: int,
    lr: float,
    batches: Sequence[Batch],
    saves_in: AnyPath,
    listeners: Sequence[Listener],
    board: StatusBoard,
) -> bool:
    """True if the run has gone back to an earlier checkpoint after a step without an update; else the step is skipped.

    Raises:
        FinalFailure: if it is to stop; says what was wrong, and where it began.
    """
    what = guard.describe(result)
    if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
        what += f"; first not finite is {first_nonfinite(state.model, batches)}"
    action = guard.action(result, what=what)
    if action == "stop":
        raise FinalFailure(
            f"{what}. Nothing was updated, and earlier checkpoints are untouched. {_advice(config, step=step, lr=lr)}"
        )
    if action == "skip":
        _tell(listeners, f"step {step} is skipped: {what}")
        return False
    board.doing(RankPhase.LOADING)
    path = guard.go_back(state, step=step, saves_in=saves_in, what=what)
    for listener in listeners:
        listener.on_rolled_back(state.step)
    _tell(
        listeners, f"step {step}: {what}. Back to {path}, to read on behind what steps {state.step + 1} to {step} read"
    )
    return True


def _advice(config: RunConfig, *, step: int, lr: float) -> str:
    """Advice for numbers that are not finite: before the first update no learning rate is to blame."""
    if step > 1:
        return (
            f"Lower optimizer.lr (it is {lr:.3g} here), lengthen optimizer.warmup_steps, or write "
            "train.on_nonfinite=skip or roll_back"
        )
    if config.model.init != "random":
        return (
            f"No step was taken yet: these are the numbers of the given weights. Check that model.init = "
            f"{config.model.init!r} is whole, and gives a finite loss in transformers"
        )
    return "No step was taken yet: look at what model.config says of first values and sizes"


def read_batches(windows: TokenWindows, model: ParallelModel, *, step: int, sizes: BatchSizes) -> list[Batch]:
    """This rank's micro-batches of `step`, counted from 1, on its device."""
    batches = windows.micro_batches(
        step - 1,
        global_batch=sizes.global_batch,
        micro_batch=sizes.micro_batch,
        batch_rank=model.batch_rank,
        num_batch_ranks=model.num_batch_ranks,
    )
    return [_with_labels(batch) for batch in batches]


def evaluate(model: ParallelModel, held_out: TokenWindows, *, micro_batch: int, max_windows: int) -> HeldOut:
    """Measures the model on held-out windows, the same ones for any number of ranks. All ranks."""
    parts = held_out.evaluation_batches(
        micro_batch=micro_batch,
        batch_rank=model.batch_rank,
        num_batch_ranks=model.num_batch_ranks,
        max_windows=max_windows,
    )
    result = model.evaluate([_with_labels(part.batch) for part in parts])
    if (rewards := rewards_of(model, result.beside)) is not None:
        return HeldOut(None, result.loss, 0, rewards)
    num_bytes = sum(part.num_bytes for part in held_out.evaluation_batches(micro_batch=1, max_windows=max_windows))
    return HeldOut(bits_per_byte(result.loss_sum, num_bytes=num_bytes), result.loss, num_bytes)


def _with_labels(batch: Batch) -> Batch:
    """Adds `labels` to a batch: Hugging Face models compute a loss only if they are there."""
    return {**batch, "labels": batch["shift_labels"]}


def _is_due(step: int, *, every: int) -> bool:
    return every > 0 and step % every == 0


def _tell(listeners: Sequence[Listener], text: str) -> None:
    for listener in listeners:
        listener.on_note(text)
