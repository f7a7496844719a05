"""The examination finds what is planted, under the name of the invariant that it breaks, and nothing else."""

import pytest
import torch
import torch.distributed as dist

from rotorch.core.errors import RankFailure
from rotorch.testing import conformance
from rotorch.testing.conformance import INVARIANTS, examine, make_case


@pytest.fixture(scope="module")
def case(warm, tiny, tmp_path_factory):
    return make_case(tiny("llama"), directory=tmp_path_factory.mktemp("case") / "checkpoint", layers=2)


@pytest.fixture
def broken(case, tmp_path, monkeypatch):
    """Invariants, of some, that break when `mistake(model)` is made on every rank."""

    def of(mistake, *names, parallel="ddp=2"):
        original = conformance.parallelize

        def parallelize(*args, **kwargs):
            model = original(*args, **kwargs)
            mistake(model)
            return model

        monkeypatch.setattr(conformance, "parallelize", parallelize)
        monkeypatch.setattr(conformance, "INVARIANTS", {name: INVARIANTS[name] for name in names})
        found = examine(case, parallel=parallel, scratch=tmp_path, timeout_s=60)
        return {name for name, problems in found.items() if problems}

    return of


def nothing(model):
    return None


def test_nothing_planted_nothing_found(broken):
    assert broken(nothing, *INVARIANTS, parallel="single") == set()


def test_scaled_gradients(broken):
    def mistake(model):
        finish = model.sharded.finish

        def wrong():
            finish()
            for gradient in model.sharded.gradients():
                gradient.mul_(1.01)

        model.sharded.finish = wrong

    names = ("at_rest_every_parameter_is_a_dtensor", "loss_and_gradients_are_those_of_one_process")
    assert broken(mistake, *names) == {names[1]}


def test_gradients_that_somebody_replaced_are_forgotten(broken):
    def mistake(model):
        step, ours = model.forward_backward, {}

        def wrong(batch):
            for name, held in model.weights.items():
                if held.local_grad is not None and held.local_grad.data_ptr() != ours[name]:
                    held.parameter.grad = None
            loss = step(batch)
            ours.update({name: held.local_grad.data_ptr() for name, held in model.weights.items()})
            return loss

        model.forward_backward = wrong

    names = ("gradients_add_up_until_cleared", "weights_are_home_after_a_step")
    assert broken(mistake, *names, parallel="single") == {names[0]}


def all_in_training_mode_after(model, evaluate):
    def wrong(batch):
        found = evaluate(batch)
        model.module.train()
        return found

    return wrong


def without_evaluation_mode(model, evaluate):
    def wrong(batch):
        model.module.eval = lambda: model.module
        model.module.train()
        return evaluate(batch)

    return wrong


@pytest.mark.parametrize("wrongly", [all_in_training_mode_after, without_evaluation_mode])
def test_evaluation_in_another_mode(wrongly, broken):
    def mistake(model):
        model.evaluate = wrongly(model, model.evaluate)

    names = ("evaluation_is_that_of_one_process", "weights_are_home_after_a_step")
    assert broken(mistake, *names, parallel="single") == {names[0]}


def test_weights_left_lent(broken):
    def mistake(model):
        next(iter(model.weights.values())).reshard = lambda: None

    names = ("initial_values_depend_on_the_seed_alone", "weights_are_home_after_a_step")
    assert broken(mistake, *names, parallel="single") == {names[1]}


def test_replicas_that_drift_apart(broken):
    def mistake(model):
        changed = model.sharded.values_changed

        def wrong():
            changed()
            if dist.get_rank() == 1:
                model.weights["model.norm.weight"].local.mul_(1 + 1e-6)

        model.sharded.values_changed = wrong

    assert broken(mistake, "initial_values_depend_on_the_seed_alone") == {"initial_values_depend_on_the_seed_alone"}


def test_one_byte_more_than_the_layout_says(broken):
    def mistake(model):
        held = model.weights["model.norm.weight"]
        held.local = torch.cat([held.local, torch.zeros(1)])

    assert broken(mistake, "resident_bytes_are_the_layouts", parallel="single") == {"resident_bytes_are_the_layouts"}


def test_one_message_more_than_the_layouts_say(broken):
    def mistake(model):
        finish = model.sharded.finish

        def wrong():
            finish()
            dist.all_reduce(torch.zeros(100_000))

        model.sharded.finish = wrong

    assert broken(mistake, "sent_bytes_are_the_layouts") == {"sent_bytes_are_the_layouts"}


def test_an_exception_on_all_ranks_is_a_problem_of_one_invariant(broken):
    def mistake(model):
        model.evaluate = lambda batch: 1 / 0

    names = ("evaluation_is_that_of_one_process", "weights_are_home_after_a_step")
    assert broken(mistake, *names) == {names[0]}


def test_an_exception_on_one_rank_ends_the_examination_and_names_the_invariant(broken, monkeypatch):
    def mistake(model):
        if dist.get_rank() == 1:
            model.evaluate = lambda batch: 1 / 0

    with pytest.raises(RankFailure, match=r"(?s)rank 1 raised.*in the invariant evaluation_is_that_of_one_process"):
        broken(mistake, "evaluation_is_that_of_one_process")
