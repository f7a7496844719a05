"""One rank of 8, the others faked, with any row's model: on CPU to count, on a GPU to measure (see gpu.py).

Nothing is sent, and nothing is waited for: over torch's fake process group, or over memory without peers. So a rank
does what it would do if communication hid entirely; values mean nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import rotorch
from rotorch.comm.ring import RingSetup
from rotorch.comm.transports.symmetric_memory import SymmetricMemoryRing
from rotorch.core.compiling import Compile
from rotorch.models.blocks import repeated_blocks
from rotorch.models.compiled import compile_blocks
from rotorch.models.hf import causal_lm, config_from_dict
from rotorch.models.losses import causal_lm_loss
from rotorch.strategies.rtp import apply as rtp_apply
from rotorch.strategies.rtp.plan import RTP
from rotorch.testing.fake import as_rank
from rotorch.testing.null_peer_memory import NullPeerMemory
from rotorch.testing.operations import Operations, counted_waits, waits_of_micro_batches
from rotorch.train.module import precision_arguments

NUM_RANKS = 8
LLAMA_3_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
TINY = {**LLAMA_3_8B, "vocab_size": 512, "hidden_size": 128, "intermediate_size": 448, "num_hidden_layers": 6}
"""The same 32 times narrower: units have the sizes of one another."""
PEER, PEER_IN_CHUNKS = "fsdp2", "fsdp2 in chunks"
"""Torch's `fully_shard`; and with groups of their own for embedding and head, and a loss in chunks of tokens."""
NUM_CHUNKS = 8
NULL = f"rtp={NUM_RANKS}[transport=symmetric_memory]"
"""Over memory without peers."""


class ChunkedLoss(nn.Module):
    """A causal language model whose logits exist a chunk of tokens at a time, in forward and in backward.

    Attributes:
        model: all but its head.
        loss: the head, with the loss of all chunks: one group of FSDP2 gathers it once.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.loss = model.model, _HeadInChunks(model.lm_head)

    def forward(self, ids: Tensor) -> Tensor:
        """Returns the mean loss of `ids` [rows, tokens]."""
        hidden = self.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        return self.loss(hidden, ids[:, 1:])


class _HeadInChunks(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        chunks = zip(hidden.chunk(NUM_CHUNKS, dim=1), targets.chunk(NUM_CHUNKS, dim=1), strict=True)
        losses = [checkpoint(self._sum, *chunk, use_reentrant=False) for chunk in chunks]
        return torch.stack(losses).sum() / targets.numel()

    def _sum(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(hidden).flatten(0, 1).float(), targets.flatten(), reduction="sum")


class Contender:
    """One row's model on a rank of the fake group, and the memory of its lanes if it has any.

    Args:
        parallel: layout, or the peer.
        mode: precision of its passes.
        shapes: contents of the model's `config.json`.
        layers: depth.
        tokens: of the batch.
        device: "cpu" or "cuda".
        compile: blocks run by torch.compile.
        wider: weights in float64 and passes in float32, in place of float32 and bfloat16.

    Attributes:
        operations: counts while it is entered.
    """

    def __init__(
        self,
        parallel: str,
        mode: str,
        *,
        shapes: dict[str, Any],
        layers: int,
        tokens: int,
        device: str = "cpu",
        compile: Compile = False,
        wider: bool = False,
    ) -> None:
        self.operations = Operations()
        self._memory: NullPeerMemory | None = None
        config = config_from_dict({**shapes, "num_hidden_layers": layers, "use_cache": False}, source=__file__)
        is_peer = parallel in (PEER, PEER_IN_CHUNKS)
        self._vocabulary, self._ids_on = shapes["vocab_size"], device if is_peer else "cpu"
        self.give(tokens)
        with rotorch.on_meta():
            module = causal_lm(config).train().to(torch.float64 if wider else torch.float32)
        self.model: Any = None
        self._module = module
        if is_peer:
            dtypes = (torch.float32, torch.float64) if wider else (getattr(torch, mode), torch.float32)
            if compile:
                compile_blocks(module)
            if parallel == PEER:
                under_fsdp2(module, *dtypes, device=device)
                self._passes: Callable[[], Any] = lambda: causal_lm_loss(module, *self._batch()).backward()
                return
            self._module = chunked = ChunkedLoss(module)
            under_fsdp2(chunked, *dtypes, apart=[chunked.model.embed_tokens, chunked.loss], device=device)
            self._passes = lambda: chunked(self._ids).backward()
            return
        with ExitStack() as stack:
            if "symmetric_memory" in parallel:
                stack.enter_context(mock.patch.object(rtp_apply, "make_ring", self._null_ring))
                stack.enter_context(mock.patch.object(RTP, "on_device", lambda strategy, _: strategy))
            arguments = precision_arguments(mode)
            if wider:  # no user needs it, so it is refused
                arguments = {"param_dtype": torch.float32}
                stack.enter_context(mock.patch.object(import_module("rotorch.parallelize"), "_check_param_dtype"))
                stack.enter_context(mock.patch.object(RTP, "at_precision", _sends))
            self.model = rotorch.parallelize(module, parallel, device=device, compile=compile, **arguments)
        self._passes = lambda: self.model.forward_backward(self._batch()[0])

    def give(self, tokens: int) -> None:
        """Makes another batch, of one sample: where its user best has it, on the device, or for rotorch on the host."""
        self._ids = torch.randint(self._vocabulary, (1, tokens)).to(self._ids_on)

    def _batch(self) -> tuple[dict[str, Tensor], int]:
        """The batch, and the number of its targets."""
        return {"input_ids": self._ids, "labels": self._ids}, self._ids.numel() - 1

    def forward_backward(self) -> None:
        """One step without the optimizer, into fresh gradients."""
        for parameter in self._module.parameters():
            parameter.grad = None
        self._passes()

    def fill(self) -> None:
        """Gives weights and slots small numbers: what lies in fresh memory may be no number, and slow."""
        if self.model is not None:
            fill_with_noise(self.model)
        for parameter in () if self.model is not None else self._module.parameters():
            parameter.to_local().detach().normal_(std=0.02)
        for buffer in self._module.buffers():  # angles of positions, which FSDP2's ranks would load
            if buffer.is_floating_point() and self.model is None:
                buffer.normal_()

    def _null_ring(self, _transport: str, **given: Any) -> SymmetricMemoryRing:
        memory = NullPeerMemory

        def make_memory(**window: Any) -> NullPeerMemory:
            self._memory = memory(**window, copy_engine=lambda: self.operations.paused())
            return self._memory

        setup = RingSetup(
            given["mesh"],
            given["numels_in_parts"],
            given["dtype"],
            device=given["device"],
            wire_dtype=given["wire_dtype"],
            hop_dtype=given["hop_dtype"],
            later_parts=given["later_parts"],
        )
        together = {"num_visits": given["num_visits"], "flat_chunks": given["flat_chunks"]}
        return SymmetricMemoryRing(setup, **together, make_memory=make_memory)

    @property
    def lane_calls(self) -> int:
        """Calls of lanes so far."""
        return 0 if self._memory is None else self._memory.num_calls

    def counted(self) -> dict[str, int]:
        """Counts of one step."""
        self.operations = operations = Operations()
        calls = self.lane_calls
        with operations:
            self.forward_backward()
        return {
            "ops": operations.num_ops,
            "casts": operations.num_casts,
            "copies": operations.num_copies,
            "elementwise_bytes": operations.elementwise_bytes,
            "lane_calls": self.lane_calls - calls,
        }

    def sync_calls(self) -> dict[str, int]:
        """Calls of one step for which the host waits, from the first to the last micro-batch."""
        if self.model is None:
            with counted_waits() as waits:
                self.forward_backward()
            return dict(waits)
        with waits_of_micro_batches(self.model) as waits:
            self.forward_backward()
        return dict(waits)


def _sends(strategy: RTP, dtype: str | None) -> RTP:
    """The strategy with slices that travel in a pass's dtype, whichever that is."""
    return strategy.model_copy(update={"compute": dtype})


def under_fsdp2(
    module: nn.Module,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    *,
    apart: Sequence[nn.Module] = (),
    device: str = "cpu",
) -> None:
    """Torch's `fully_shard` around every block, `apart` and the root, as its documentation has it. In place."""
    mesh = init_device_mesh(device, (NUM_RANKS,))
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    for part in (*repeated_blocks(module), *apart):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    module.to_empty(device=device)


@contextmanager
def in_group_of(parallel: str) -> Iterator[None]:
    """The fake group that a layout needs, within the block."""
    ranks = 1 if parallel == "single" else NUM_RANKS
    with as_rank(3 % ranks, num_ranks=ranks):
        yield


def fill_with_noise(model: Any) -> None:
    """Gives weights and slots small numbers: from others nothing comes, and what is there by chance may be anything."""
    held = [weight.local for weight in model.weights.values()]
    for tensor in [*held, *model.sharded.slots()]:
        tensor.detach().normal_(std=0.02)
    model.values_changed()


@contextmanager
def unsent_gradients() -> Iterator[None]:
    """Lets torch's DDP do all but send: the fake group's answer is none that it can take."""
    from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
    from torch.nn.parallel import DistributedDataParallel

    class Unsent(DistributedDataParallel):
        __signature__ = inspect.signature(DistributedDataParallel)  # whose names of arguments are asked for

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.register_comm_hook(None, noop_hook)

    with mock.patch("rotorch.strategies.ddp.apply.DistributedDataParallel", Unsent):
        yield
