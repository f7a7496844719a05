"""Which of several failing ranks a message names."""

from rotorch.core.errors import RankFailure
from rotorch.train.deaths import explain
from rotorch.train.status import FailureKind, Phase, RankStatus


def failed(rank, *, kind, at_s, message):
    return RankStatus(rank, 100 + rank, 3, Phase.FORWARD_BACKWARD, kind, at_s, 0.0, message, "")


def test_a_rank_that_only_heard_of_a_failure_is_not_the_first():
    heard = failed(0, kind=FailureKind.HEARD, at_s=1.0, message="another stage raised")
    cause = failed(1, kind=FailureKind.OWN, at_s=2.0, message="IndexError: too large")
    told = explain([heard, cause], deaths={})
    assert isinstance(told, RankFailure) and str(told).startswith("rank 1 failed")
    assert "IndexError: too large" in str(told)
