"""`rotorch eval --tasks`: tasks of EleutherAI's lm-eval by a checkpoint's model, under any layout but pipelines."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rotorch.core.errors import ConfigError, nearest
from rotorch.parallel_model import ParallelModel
from rotorch.pipelining.stage_strategy import StageStrategy
from rotorch.train.data.tokens import check_vocabulary
from rotorch.train.saved_model import SavedModel, use_saved_model


@dataclass(frozen=True)
class Questions:
    """Tasks to measure a model on.

    Attributes:
        tasks: names of lm-eval's tasks and groups.
        directory: further tasks, as YAML files.
        few_shot: examples before each question; None: as the task has it.
        limit: questions of each task; None: all.
    """

    tasks: tuple[str, ...]
    directory: Path | None = None
    few_shot: int | None = None
    limit: int | None = None


def measure_tasks(
    saved: SavedModel,
    asked: Questions,
    *,
    micro_batch: int | None = None,
    summary: Path | None = None,
) -> None:
    """Measures the model on tasks, and prints a line for each of their metrics. Starts ranks.

    Args:
        saved: the model.
        asked: the tasks.
        micro_batch: rows in one pass of one rank; None: the run's.
        summary: a JSON file for the results.

    Raises:
        ConfigError: the package is missing, no such task, the layout is a pipeline, or the rows of a pass have no room.
    """
    if any(isinstance(strategy, StageStrategy) for strategy in saved.strategies):
        raise ConfigError("eval: a pipeline answers no tasks. Write another --parallel, e.g. single, fsdp=2 or rtp=2")
    rows = saved.rows_of_pass(micro_batch)
    directory = asked.directory
    if directory is not None and not directory.is_dir():
        raise ConfigError(f"--task-dir {directory}: no such directory. Write one with the tasks' YAML files")
    check_vocabulary(saved.open_tokens().vocab_size, model_vocab=saved.model_config.get_text_config().vocab_size)
    try:
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise ConfigError("eval --tasks: needs the package lm-eval. Write pip install 'rotorch[lm-eval]'") from None
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    known = TaskManager(include_path=None if directory is None else str(directory))
    for name in asked.tasks:
        if name not in known.all_tasks:
            where = " (--task-dir names a directory of further ones)" if directory is None else ""
            raise ConfigError(
                f"eval --tasks: no task {name!r}{nearest(name, known=known.all_tasks)}. Write a name that "
                f"`lm-eval ls tasks` lists{where}"
            )
    work = partial(
        _measure,
        saved=saved,
        asked=asked,
        known=known,
        micro_batch=rows,
        summary=summary,
    )
    use_saved_model(saved, work)


def _measure(
    model: ParallelModel,
    *,
    saved: SavedModel,
    asked: Questions,
    known: Any,
    micro_batch: int,
    summary: Path | None,
) -> None:
    """One rank's part: all ranks run the harness, the first one prints."""
    from lm_eval.evaluator import simple_evaluate

    from rotorch.train.harness_model import HarnessModel

    longest = getattr(saved.model_config.get_text_config(), "max_position_embeddings", None)
    harness_model = HarnessModel(model, tokens=saved.open_tokens(), longest=longest, micro_batch=micro_batch)
    found = simple_evaluate(
        model=harness_model,
        tasks=list(asked.tasks),
        task_manager=known,
        num_fewshot=asked.few_shot,
        limit=asked.limit,
        log_samples=False,
        bootstrap_iters=0,  # it would start processes on every rank
    )
    if model.mesh.size() > 1 and model.mesh.get_rank() != 0:
        return
    assert found is not None, "rank 0 of one has them"
    results = {name: _numbers(of_task) for name, of_task in found["results"].items()}
    print(f"checkpoint  {saved.checkpoint}, step {saved.manifest.step}")
    for name, numbers in results.items():
        for metric, value in numbers.items():
            print(f"{name:<24} {metric:<24} {value:.4f}")
    if summary is not None:
        about = {"checkpoint": str(saved.checkpoint), "step": saved.manifest.step, "results": results}
        counts = {name: counted["effective"] for name, counted in found["n-samples"].items()}
        summary.write_text(json.dumps({**about, "num_questions": counts}, indent=2) + "\n", "utf-8")


def _numbers(of_task: dict[str, Any]) -> dict[str, float]:
    """The metrics of a task that are numbers, by their names without the filter "none"."""
    return {
        key.removesuffix(",none"): float(value)
        for key, value in of_task.items()
        if isinstance(value, int | float) and "," in key and "_stderr" not in key
    }
