import pytest
import torch
from torch import nn

from rotorch._torch_private import TorchDispatchMode, tree_flatten
from rotorch.models.hf import causal_lm, load_config
from rotorch.testing.arithmetic import exact_arithmetic, widen


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.float(),
        lambda x: x.to(torch.float32),
        lambda x: x.to("cpu", torch.float32),
        lambda x: x.type(torch.float32),
        lambda x: torch.softmax(x, -1, dtype=torch.float32),
        lambda x: x.sum(dtype=torch.float32),
        lambda x: torch.zeros(3),
        lambda x: torch.arange(3, dtype=torch.float32),
        lambda x: torch.tensor([1.0]),
        lambda x: x.new_ones(2, dtype=torch.float32),
    ],
)
def test_what_asks_for_float32_gets_float64(make):
    x = torch.ones(4, dtype=torch.float64)
    with exact_arithmetic():
        assert make(x).dtype == torch.float64
    assert torch.zeros(1).dtype == torch.float32


def test_other_dtypes_stay():
    with exact_arithmetic():
        assert torch.ones(2).to(torch.bfloat16).dtype == torch.bfloat16
        assert torch.ones(2).to(torch.int64).dtype == torch.int64
        assert torch.ones(2, dtype=torch.complex128).to(torch.complex64).dtype == torch.complex128


def test_the_default_is_put_back_after_an_error():
    with pytest.raises(ZeroDivisionError), exact_arithmetic():
        raise ZeroDivisionError
    assert torch.get_default_dtype() == torch.float32


def test_it_holds_in_the_backward_of_custom_functions():
    seen = []

    class Recompute(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            seen.append(grad.float().dtype)
            return grad * 2

    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    with exact_arithmetic():
        Recompute.apply(x).sum().backward()
    assert seen == [torch.float64]


class Float32(TorchDispatchMode):
    """Collects operations whose results are float32."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if any(isinstance(t, torch.Tensor) and t.dtype == torch.float32 for t in tree_flatten(result)[0]):
            self.found.add(str(func))
        return result


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt_neox", "olmo2", "mixtral"])
def test_no_float32_is_left_in_a_training_step(tiny, family):
    module = widen(causal_lm(load_config(tiny(family))))
    ids = torch.arange(40).view(2, 20)
    with exact_arithmetic(), Float32() as left:
        module(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert left.found == set()


def test_widening_keeps_meta_parameters_and_their_recipes():
    import rotorch
    from rotorch.shard.materialize import take_recipes

    with rotorch.on_meta():
        module = nn.Linear(2, 3)
    weight = module.weight
    assert widen(module).weight is weight
    assert weight.is_meta and weight.dtype == torch.float64
    assert set(take_recipes(module)) == {"weight", "bias"}
