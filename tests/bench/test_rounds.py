import pytest

from rotorch.bench.bar import parse_bar
from rotorch.bench.rank import StepTime
from rotorch.bench.rounds import STEPS_TO_WAKE, WARM_UP_STEPS, Times, ratio, take_turns
from rotorch.core.errors import ConfigError, RankFailure


def steps(*seconds, late=0.0):
    return [StepTime(10.0 * i + late, 10.0 * i + 0.5 * s, 10.0 * i + s, 1.0) for i, s in enumerate(seconds)]


class Fake:
    """Ranks that note when they are asked, and fail at the `fails_at`-th time."""

    def __init__(self, name, asked, fails_at=None):
        self.name, self.asked, self.fails_at, self.times = name, asked, fails_at, 0

    def ask(self, question, *, count):
        self.asked.append((self.name, count))
        self.times += 1
        if self.times == self.fails_at:
            raise RankFailure("gone")
        return [steps(*[1.0] * count), steps(*[2.0] * count, late=0.25)]


def test_a_step_lasts_from_the_first_start_to_the_last_end():
    times = Times()
    times.add([steps(1.0, 3.0), steps(2.0, 2.5, late=0.25)], dropped=0)
    assert times.rounds == [[2.0, 3.0]]
    assert times.optimizer_s == [1.0, 1.5]


def test_warm_up_gives_losses_but_no_times():
    times = Times()
    times.add([steps(1.0), steps(1.0)], dropped=1)
    assert times.rounds == times.optimizer_s == [] and times.losses == [[1.0, 1.0]]


def test_the_first_step_of_a_turn_gives_a_loss_but_no_time():
    times = Times()
    times.add([steps(9.0, 1.0, 2.0)], dropped=1)
    assert times.rounds == [[1.0, 2.0]] and times.optimizer_s == [0.5, 1.0] and len(times.losses) == 3


def test_ratios_are_taken_within_rounds():
    slow_then_fast = Times(rounds=[[2.0, 2.2, 2.4], [1.0, 1.1, 1.2], [1.0, 1.0, 1.0]])
    twice = Times(rounds=[[4.4, 4.4, 4.4], [2.2, 2.2, 2.2], [1.0, 1.0, 1.0]])
    found = ratio(slow_then_fast, to=twice)
    assert found.rounds == pytest.approx([2.0, 2.0, 1.0])
    assert found.median == pytest.approx(2.0)
    assert found.best == pytest.approx(1.0)


def test_rows_take_turns_and_begin_in_turn():
    asked = []
    times = take_turns({n: Fake(n, asked) for n in "ab"}, num_rounds=3, num_steps=4, failed=lambda *_: None)
    warm_up = [("a", WARM_UP_STEPS), ("b", WARM_UP_STEPS)]
    count = STEPS_TO_WAKE + 4
    assert asked == [*warm_up, *((name, count) for name in "abbaab")]
    assert [len(times[n].all_s) for n in "ab"] == [12, 12]


def test_a_row_that_fails_leaves_the_others():
    asked, failures = [], []
    rows = {"a": Fake("a", asked), "b": Fake("b", asked, fails_at=2)}
    times = take_turns(rows, num_rounds=2, num_steps=4, failed=lambda row, failure: failures.append(row))
    assert failures == ["b"] and list(times) == ["a"]
    assert asked.count(("b", STEPS_TO_WAKE + 4)) == 1 and len(times["a"].rounds) == 2


def test_a_bar_of_speed_holds_or_not():
    times = {"rtp=2": Times(rounds=[[1.0]]), "ddp=2": Times(rounds=[[1.1]])}
    bar = parse_bar("rtp=2>=1.05*ddp=2", rows=times)
    assert bar.check(times, {}) == (True, pytest.approx(1.1))
    assert parse_bar("rtp=2 >= 1.2 * ddp=2", rows=times).check(times, {})[0] is False
    assert bar.check({"rtp=2": times["rtp=2"]}, {}) == (False, None)


def test_a_bar_of_memory_holds_or_not():
    memory = {
        "rtp=4[recompute=slice]": {"peak": 60, "rest": 50, "process": 3 << 20},
        "fsdp2": {"peak": 100, "rest": 40},
    }
    rows = list(memory)

    def check(text):
        bar = parse_bar(text, rows=rows)
        assert str(parse_bar(str(bar), rows=rows)) == str(bar)
        return bar.check({}, memory)

    assert check("peak rtp=4[recompute=slice] <= 0.75 * fsdp2") == (True, 0.6)
    assert check("peak rtp=4[recompute=slice] <= .5 * fsdp2") == (False, 0.6)
    assert check("rest rtp=4[recompute=slice] <= 1 * fsdp2") == (False, 1.25)
    assert check("process rtp=4[recompute=slice] <= 3 * MiB") == (True, 3.0)
    assert check("process fsdp2 <= 3 * MiB") == (False, None)  # it was not measured


BAD_BARS = [
    "rtp=2 > ddp=2",
    "rtp=2 >= x * ddp=2",
    "rtp=2 >= 1 * ddp=3",
    "",
    "peak rtp=2 <= 1 * ddp=3",
    "rtp=2 <= 1 * ddp=2",
    "rtp=2 >= 1 * MiB",
    "peak MiB <= 1 * ddp=2",
    "process rtp=2 <= 1 * MiB",  # nobody measures it
]


@pytest.mark.parametrize("text", BAD_BARS)
def test_a_bar_that_cannot_be_read_is_an_error(text):
    with pytest.raises(ConfigError, match="bar"):
        parse_bar(text, rows=["limit", "rtp=2", "ddp=2"], processes=False)
