"""`docs/failures.md`: what a user sees of each failure, as the tests that provoke it saw it.

A test calls `seen(title, message)`, which holds the message against the page: its words, not its numbers and paths.
With ROTORCH_WRITE_FAILURES=1 it is written into the page instead (`make failures`).
"""

import os
import re
import textwrap
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "failures.md"
WRITES = "ROTORCH_WRITE_FAILURES"

INTRODUCTION = """# What failures look like

What a user sees of each failure: the last lines on the screen, as the tests that provoke it see them. Written by
`make failures`; the tests hold the words below against what happens. What was wrong with the input ends a command with
exit code 2 before anything starts, a failure while running with 3. Whatever happens, the last checkpoint stays whole,
and the command that the run printed goes on from it with `--resume`.
"""

SECTIONS = {
    "Ranks are started differently": "By torchrun or by hand, with another configuration or layout on one of them. "
    "Every rank says it, with exit code 2, before anything is written.",
    "Ranks have different texts": "Under one name, as on two hosts of which one has an older copy.",
    "Ranks have different libraries": "Numbers depend on these.",
    "One rank refuses to start": "The others hear of it through the store and end with exit code 2, too.",
    "The host of rank 0 has no address": "MASTER_ADDR names a host that this one does not know. Asked for "
    "during a minute: a host that has just been started may still get its name. Exit code 2.",
    "Rank 0 does not come": "Nobody listens where it should be, for `train.timeout_s` and 20 s. Exit code 3.",
    "Given weights are not finite": "Found by a rank that loads them. Exit code 2, and no run is begun.",
    "Shared memory is full": "Or small, as a container's is by default. Ranks of one host exchange messages then.",
    "Shared memory is full, and was asked for": "By `transport=shared_memory`. Exit code 2.",
    "A second run in the same directory": "Also with `--resume`, or with the same directory of checkpoints. Exit code "
    "2; the first run's files stay as they are. The lock of a run that was killed blocks nobody.",
    "A run without a checkpoint is resumed": "It begins anew, and the metrics that are there are kept.",
    "The run's directory is removed": "While the run goes on: it is made again, with all metrics. Exit code 0.",
    "The run's directory was taken by another run": "Removed while the run went on, and used by another one since.",
    "Nobody reads the output any more": "As with `| head -1`, which shows this line. Nothing is said: the run goes on "
    "to its end. Exit code 0.",
    "Ctrl-C": "SIGTERM (exit code 143) and SIGHUP (129) do the same: the step is finished, and a checkpoint written. "
    "Exit code 130.",
    "Ctrl-C twice": "Ends at once, without a checkpoint. So does SIGQUIT (Ctrl-\\\\) the first time, with exit code 3.",
    "A run goes on by itself": "With `train.max_restarts`.",
    "A run goes on with fewer ranks": "With `train.elastic`, where a restart at the same size has not come far.",
    "A run was restarted often enough": "It ends as it would have without restarts.",
    "A rank is killed": "By the system when memory runs out, or by somebody. The other ranks are ended at once.",
    "A rank raises an exception": "Its traceback lies in the run's directory, in `traceback-rank1.txt`.",
    "A rank does not get on": "For `train.timeout_s`, nor does anybody else: a rank that somebody has stopped, a lost "
    "message, collectives that do not match. `failure.txt` says of every rank at which unit, slice and micro-batch it "
    "is, whom it waits for and since when, with its Python stack and what torch has recorded of its collectives.",
    "A rank runs out of memory": "The names are those of the memory ledger of `rotorch bench`. What is missing counts "
    "what will be there later, too: gradients, and the optimizer's state before its first step. Where 256 MiB of the "
    "host's memory are left, as on a GPU, passes are counted on fake tensors, and the message says what a step takes "
    "at its highest moment.",
    "A rank runs out of memory in a save": "The names are those of the memory ledger.",
    "The loss is not finite": "The batch has gone forward a second time, to find where it began. `train.on_nonfinite` "
    "decides whether the run stops, skips the batch, or goes back to its last checkpoint.",
    "A batch is skipped": "With `train.on_nonfinite = \"skip\"`; ten in a row end the run.",
    "The run goes back": "With `train.on_nonfinite = \"roll_back\"`, or at a loss above `train.spike_factor` times the "
    "median. Doing the same steps again would give the same numbers, so the run reads on behind them.",
    "Ranks hold different weights": "Found by `train.check_every`. With three holders or more, the one that differs is "
    "named.",
    "A weight has changed between two updates": "Found by `train.check_every`, also where one rank alone holds the "
    "part, and before the next update.",
    "A byte of the last checkpoint has changed": "`--resume` says so and takes the one before.",
    "A byte of the only checkpoint has changed": "There is nothing to go on from.",
    "A save was cut off": "What it left is never taken for a checkpoint, and removed by the next save.",
    "A file of a checkpoint is too short": "As after a power failure, on a disk that has said more than it did.",
    "A checkpoint of a later rotorch": "Not skipped in favour of an older one.",
    "The disk is full before a save": "Nothing is written where it would not fit.",
    "The disk fills up during a save": "On any rank: all of them say the same.",
    "The disk fills up during a save behind the run": "With `train.async_save`; told at the next step.",
}  # fmt: skip
"""What may be on the page, in its order, and what to say below each title."""


def seen(title: str, message: str, *, instead: dict[str, str] | None = None) -> None:
    """Holds what a user saw of a failure against the page.

    Args:
        title: one of SECTIONS.
        message: what was on the screen.
        instead: what to put instead of parts that differ from time to time, by patterns.
    """
    for pattern, text in {**_EVERYWHERE, **(instead or {})}.items():
        message = re.sub(pattern, text, message)
    message, page = message.strip(), parse(PAGE.read_text() if PAGE.exists() else "")
    if os.environ.get(WRITES):
        PAGE.write_text(render({**page, title: message}))
    else:
        assert words(message) == words(page.get(title, "")), f"{PAGE.name}: {title!r} has changed: run make failures"


_EVERYWHERE = {
    r"/tmp/\S*?/(?=checkpoints/)|/tmp/\S*?/run/": "runs/my_run/",
    r"tmp-\d+": "tmp-4711",
}


def words(message: str) -> str:
    """A message without its numbers."""
    return re.sub(r"\d[\d.]*(e[+-]?\d+)?( (B|KiB|MiB|GiB|TiB|PiB)\b)?|\bnan\b|\binf\b", "#", message)


def parse(text: str) -> dict[str, str]:
    """The messages of a page by their titles."""
    return dict(re.findall(r"^## (.+?)\n.*?^```text\n(.*?)\n```$", text, flags=re.MULTILINE | re.DOTALL))


def render(messages: dict[str, str]) -> str:
    """The page."""
    parts = [INTRODUCTION]
    for title, about in SECTIONS.items():
        if title in messages:
            parts.append(f"## {title}\n\n{textwrap.fill(about, 120)}\n\n```text\n{messages[title]}\n```\n")
    return "\n".join(parts)
