"""Status words that ranks write during a step, under each strategy."""

import pytest
import torch
from torch import distributed as dist

import rotorch
from rotorch.comm.status_word import describe_status
from rotorch.models.hf import causal_lm, load_config
from rotorch.testing.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("warm")


class Diary:
    """A place that remembers all that was written there."""

    def __init__(self):
        self.now, self.micro_batch, self.peer, self.seen = 0, 0, 0, []

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "now" and hasattr(self, "seen"):
            self.seen.append((value, self.micro_batch, self.peer))


def places_of(path, layout):
    """This rank's places in a step of two micro-batches, in words, and where it is at the end of it."""
    torch.manual_seed(0)
    config = load_config(path)
    config.num_hidden_layers = 2
    model = rotorch.parallelize(causal_lm(config), layout, device="cpu")
    place = Diary()
    names = model.write_status_to(place)
    ids = torch.randint(0, 300, (2, 16), generator=torch.Generator().manual_seed(dist.get_rank()))
    model.forward_backward([{"input_ids": ids, "labels": ids}] * 2)
    model.evaluate({"input_ids": ids, "labels": ids})
    return [describe_status(*seen, names=names) for seen in place.seen], place.now


EXPECTED = {
    "rtp=2[transport=send_receive]": [
        "micro-batch 1, waiting for slice 1 of 'model.layers.1.mlp' from rank 1",
        "micro-batch 2, at slice 1 of 'model.layers.0.self_attn', forward",
        "micro-batch 2, at slice 0 of 'model.layers.1.mlp', backward",
        "micro-batch 2, waiting for the gradient of slice 0 of 'model.layers.1.mlp' from rank 1",
    ],
    "rtp=2[transport=send_receive,buffering=in_place]": [
        "micro-batch 1, waiting for slice 1 of 'model.layers.1.mlp' from rank 1",
        "micro-batch 2, at slice 0 of 'model.layers.1.mlp', backward",
    ],
    "rtp=2[transport=shared_memory]": [
        "micro-batch 1, at 'model.layers.1.mlp.up_proj.weight', forward",
        "micro-batch 2, at slice 0 of 'model.layers.0.self_attn.q_proj.weight', backward",
    ],
    "rtp=2[transport=shared_memory,recompute=slice]": [
        "micro-batch 1, at slice 0 of 'model.layers.1.mlp', forward",
        "micro-batch 2, at slice 1 of 'model.layers.1.mlp', backward",
    ],
    "fsdp=2": ["micro-batch 1, at 'model.layers.0', forward", "micro-batch 2, at 'model.layers.1', backward"],
    "ddp=2,rtp=1": ["micro-batch 2, at slice 0 of 'model.layers.1.mlp.up_proj.weight', backward"],
    "pp=2": ["micro-batch 2, at stage 0", "micro-batch 1, waiting for what stage 1 sends from rank 1"],
}


@pytest.mark.parametrize("layout", EXPECTED)
def test_a_rank_is_where_it_says(layout, tiny):
    (seen, last), _ = run_ranks(places_of, tiny("llama"), layout, num_ranks=2)
    assert seen[0] == "summing the number of targets over all ranks"
    assert "completing gradients with the other ranks" in seen
    assert seen.count("summing the number of targets over all ranks") == 2  # the other one of an evaluation
    assert last == 0
    for words in EXPECTED[layout]:
        assert words in seen, sorted(set(seen))
