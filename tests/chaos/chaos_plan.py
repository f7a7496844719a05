"""Plan of the faults of a run: a pure function of a seed, so that a failure can be tried again."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

STEPS, EVERY = 11, 3
"""Steps of each run, and between its checkpoints."""


class Harm(StrEnum):
    """A fault of a run."""

    KILL = "SIGKILL of a rank"
    KILL_IN_SAVE = "SIGKILL of a rank that saves"
    STOP = "SIGSTOP of a rank"
    DISK = "the disk fills up"
    MEMORY = "shared memory is lost"
    FORWARD = "a rank raises in forward"
    BACKWARD = "a rank raises in backward"
    OPTIMIZER = "a rank raises in the optimizer"
    SAVE = "a rank raises in a save"
    ROT = "a byte of the last checkpoint changes, then SIGKILL"
    FEWER = "SIGKILL of a rank until there is one less"
    LAUNCHER = "SIGKILL of the launcher"


_IN_TURN = list(Harm)[:10]
_LATER = (Harm.FEWER, Harm.LAUNCHER)
_LATER_FROM = 80
"""Of each hundred seeds the last twenty have these, in turn; the others have the ten above."""


LAYOUTS = ("rtp=2", "rtp=2[transport=send_receive]", "fsdp=2", "ddp=2")
"""Mostly these; each on two ranks."""

_SHRINKING = ("ddp=2,rtp=2", "zeropp=2x2", "tesseract=1x1x2", "pp=2,rtp=1")
"""Of the other layouts those that there are on fewer ranks, too."""

OTHER_LAYOUTS = ("zeropp=2x1", "pp=2,rtp=1", "tesseract=1x1x2", "ddp=2,rtp=2", "tesseract=2x2x1", "zeropp=2x2")
"""Now and then one of these, on up to four ranks."""

_SHARED = ("rtp=2", "rtp=2", "ddp=2,rtp=2", "tesseract=2x2x1")
"""Layouts whose ranks share memory."""

_DELAYED = (Harm.KILL, Harm.KILL_IN_SAVE, Harm.STOP, Harm.MEMORY, Harm.ROT, Harm.LAUNCHER)
"""What a clock does. The others wait for what they are about: a module, the optimizer, a file."""

_STEP_PHASES = ("READING", "FORWARD_BACKWARD", "FORWARD_BACKWARD", "FORWARD_BACKWARD", "CLIPPING", "OPTIMIZER")


@dataclass(frozen=True)
class Plan:
    """One run of chaos.

    Attributes:
        seed: what the rest follows from.
        layout: of the run.
        harm: what happens.
        victim: to which rank.
        step: in which step of the run, from 1.
        phase: name of what the rank is beginning then (`train/launch/status.py`).
        delay_s: how long after that, if it `is_delayed`.
        after: which of several alike: the module that raises, by its turn in a pass; before (even) or behind (odd) the
            update; of a disk, before (even) or after (odd) a save has looked whether there is room; of memory, before
            all ranks have it (even) or in the step (odd).
        where: a number in [0, 1): how much room the disk has, which byte changes.
        times: how often it happens, if the run comes there again.
        max_restarts: how often the run may go on by itself.
        freed: whether a full disk has room again when the run goes on by itself.
        async_save: whether saves go on behind the run.
    """

    seed: int
    layout: str
    harm: Harm
    victim: int
    step: int
    phase: str
    delay_s: float
    after: int
    where: float
    times: int
    max_restarts: int
    freed: bool
    async_save: bool

    @property
    def unlinks(self) -> bool:
        """True if it takes shared memory away before it is opened: ranks do without, and say nothing."""
        return self.harm is Harm.MEMORY and self.phase == "BUILDING"

    @property
    def is_delayed(self) -> bool:
        """True if it happens a while after its moment: the run may be over by then."""
        return self.delay_s > 0 and self.harm in _DELAYED and not self.unlinks


def make_plan(seed: int) -> Plan:
    """The plan of a seed. Of a hundred in a row all kinds of harm happen; every fifth ten has other layouts."""
    rng = random.Random(f"chaos {seed}")
    harm = _IN_TURN[seed % 10] if seed % 100 < _LATER_FROM else _LATER[seed % 2]
    in_save = harm in (Harm.KILL_IN_SAVE, Harm.DISK, Harm.SAVE)
    layout = rng.choice(OTHER_LAYOUTS if seed // 10 % 5 == 4 else LAYOUTS)
    if harm is Harm.FEWER and layout in OTHER_LAYOUTS:
        layout = rng.choice(_SHRINKING)
    if harm is Harm.MEMORY:
        layout = rng.choice(_SHARED if layout in OTHER_LAYOUTS else _SHARED[:1])
    step = rng.randint(2, STEPS - 3)
    phase, delay_s = rng.choice(_STEP_PHASES), rng.choice((0.0, rng.uniform(0, 0.02)))
    after, where = rng.randrange(12), rng.random()
    if in_save:
        step, phase = EVERY * rng.randint(1, (STEPS - 1) // EVERY), "SAVING"
    elif harm in (Harm.FORWARD, Harm.BACKWARD):
        phase = "FORWARD_BACKWARD"
    elif harm is Harm.OPTIMIZER:
        phase = "OPTIMIZER"
    elif harm is Harm.ROT:
        step = rng.randint(2 * EVERY + 2, STEPS - 2)  # there are two checkpoints
    if harm in (Harm.MEMORY, Harm.DISK):
        after = seed // 10  # as many of both
    if harm is Harm.MEMORY:
        if after % 2 == 0:
            step, phase = 0, "BUILDING"
    elif harm is Harm.FEWER:  # late enough behind a checkpoint for that to be on the disk
        step = rng.choice([step for step in range(2, STEPS - 2) if step % EVERY != 1])
    elif harm in (Harm.KILL, Harm.STOP, Harm.LAUNCHER) and rng.random() < 0.4:
        step, phase, delay_s = rng.choice(
            ((0, "JOINING", 0.02), (0, "BUILDING", 0.3 * where), (STEPS, "EVALUATING", 0.0))
        )
    max_restarts = rng.choice((0, 3)) if harm is not Harm.FEWER else 3
    may_come_again = max_restarts and harm not in (Harm.STOP, Harm.DISK, Harm.ROT, Harm.LAUNCHER)
    victim = rng.randrange(num_ranks(layout))
    times = rng.choice((1, 2)) if may_come_again else 1
    if harm is Harm.FEWER:
        times = 2 if step <= EVERY else 3  # twice without getting on; before that it may have got on
    return Plan(
        seed=seed,
        layout=layout,
        harm=harm,
        victim=victim,
        step=step,
        phase=phase,
        delay_s=round(delay_s, 4),
        after=after,
        where=where,
        times=times,
        max_restarts=max_restarts,
        freed=rng.random() < 0.5,
        async_save=rng.random() < (0.5 if in_save else 0.25) and harm is not Harm.FEWER,
    )


def num_ranks(layout: str) -> int:
    """Number of ranks of one of the layouts above."""
    found = 1
    for part in layout.split("["):
        for size in part.split(","):
            for factor in size.partition("=")[2].split("x"):
                found *= int(factor) if factor.isdigit() else 1
    return found


def describe(plan: Plan) -> str:
    """The fault, in words for a table."""
    after = {
        Harm.FORWARD: f", module {plan.after}",
        Harm.BACKWARD: f", module {plan.after}",
        Harm.OPTIMIZER: ", before the update" if plan.after % 2 == 0 else ", behind the update",
        Harm.MEMORY: ", unlinked before it is opened" if plan.after % 2 == 0 else ", cut to nothing",
        Harm.DISK: (" before it is written" if plan.after % 2 == 0 else " while it is written")
        + (", and has room again" if plan.freed and plan.max_restarts else ""),
    }
    return f"{plan.harm}{after.get(plan.harm, '')}" + ("", ", twice", ", three times")[plan.times - 1]


def moment(plan: Plan) -> str:
    """Its moment and its rank, in words for a table."""
    words = plan.phase.lower().replace("_", " and ")
    step = f"step {plan.step}, " if plan.step else ""
    return f"rank {plan.victim}, {step}{words}" + (f" + {plan.delay_s * 1e3:.1f} ms" if plan.is_delayed else "")
