import pytest

from rotorch.bench.gate import judge, says_little

REFERENCE = [4.0, 4.2, 3.0, 3.1]


def test_equal_losses_are_right():
    losses = [[4.0, 4.0], [4.2001, 4.2001], [3.0, 3.0], [3.1, 3.1]]
    verdict = judge(losses, reference=REFERENCE, precision="float32", alone=False)
    assert verdict.reason is None
    assert verdict.max_rel_err == pytest.approx(1e-4 / 4.2)


@pytest.mark.parametrize("wrong", [3.01, float("nan"), float("inf")])
def test_one_wrong_loss_of_one_rank_is_found(wrong):
    losses = [[4.0, 4.0], [4.2, 4.2], [3.0, wrong], [3.1, 3.1]]
    verdict = judge(losses, reference=REFERENCE, precision="float32", alone=False)
    assert "step 3" in verdict.reason


def test_replicas_are_held_to_their_mean_at_the_first_step_only():
    assert judge([[3.9, 4.1], [9, 9]], reference=REFERENCE, precision="float32", alone=True).reason is None
    assert "step 1" in judge([[3.9, 3.9], [9, 9]], reference=REFERENCE, precision="float32", alone=True).reason


def test_bfloat16_is_coarser():
    assert judge([[4.01]], reference=REFERENCE, precision="bfloat16", alone=False).reason is None
    assert judge([[4.01]], reference=REFERENCE, precision="float32", alone=False).reason is not None


def test_losses_that_stand_still_prove_little():
    assert says_little([4.0, 4.2, 4.0, 4.2, 4.0], precision="float32", num_batches=2)
    assert not says_little([4.0, 4.2, 3.9, 4.1, 3.8], precision="float32", num_batches=2)
