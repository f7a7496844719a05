"""Other libraries as rows of a bench: one table of their names. Importing it loads none of them, nor torch.

A peer is a `Contender` in a file of its library's name. What is the same for all: the model, its first weights, the
batch, AdamW and its numbers, precision, threads. What is the library's: who holds what, and what is sent when. Ranks
load a peer's library themselves, so that it cannot touch the other rows.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from rotorch.core.errors import ConfigError, nearest


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One way to train that people use.

    Attributes:
        about: description, in a line.
        contender: `file:class` below this package.
        library: package that it is made with, as it is imported and installed.
        sharded: True if it claims that the ranks hold each matrix once between them; the bench checks that.
        options: further arguments of the class.
        loads_later: modules that the library imports when it starts, if they are there. They are loaded with it, so
            that the memory of a process tells what training takes, not what code does.
        environment: variables that the library reads when it is imported, on ranks without an accelerator.
        as_torch_leaves_it: True if its processes lack the settings that those of all other rows have
            (`process_settings.py`).
    """

    about: str
    contender: str
    library: str = "torch"
    sharded: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    loads_later: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    as_torch_leaves_it: bool = False

    @property
    def installed(self) -> bool:
        """True if the peer's library can be imported here."""
        return _is_installed(self.library)

    @property
    def library_version(self) -> str:
        """Version of its library."""
        return version(self.library)

    def load_library(self, *, on_cpu: bool) -> None:
        """Imports its library; only in a process that runs nothing else."""
        if on_cpu:
            os.environ.update(self.environment)
        for name in (self.library, *self.loads_later):
            if _is_installed(name):
                importlib.import_module(name)

    def load(self) -> type[Any]:
        """Returns its `Contender` class; loads torch, but not the library."""
        file, _, name = self.contender.partition(":")
        return getattr(importlib.import_module(f"{__name__}.{file}"), name)


_OF_DEEPSPEED = ("deepspeed.runtime.zero.muon.original_muon", "deepspeed.moe.layer", "deepspeed.module_inject.auto_tp")

PEERS: dict[str, Peer] = {
    "torch-ddp": Peer(
        about="torch DistributedDataParallel, gradients as views of its buckets",
        contender="torch_ddp:TorchDDP",
        sharded=False,
    ),
    "torch-ddp-as-is": Peer(
        about="torch-ddp in processes as torch leaves them",
        contender="torch_ddp:TorchDDP",
        sharded=False,
        as_torch_leaves_it=True,
    ),
    "fsdp2": Peer(
        about="torch fully_shard on every block and on the root",
        contender="fsdp2:FSDP2",
    ),
    "fsdp2-as-is": Peer(
        about="fsdp2 in processes as torch leaves them",
        contender="fsdp2:FSDP2",
        as_torch_leaves_it=True,
    ),
    "fsdp2-recompute": Peer(
        about="fsdp2 with activation checkpointing of every block",
        contender="fsdp2:FSDP2",
        options={"recompute": True},
    ),
    "fsdp2-ends": Peer(
        about="fsdp2 with groups of their own for the embedding and for norm and head, as torchtitan has it",
        contender="fsdp2:FSDP2",
        options={"ends": True},
    ),
    "fsdp2-ends-recompute": Peer(
        about="fsdp2-ends with activation checkpointing of every block",
        contender="fsdp2:FSDP2",
        options={"ends": True, "recompute": True},
    ),
    "fsdp2-per-weight": Peer(
        about="torch fully_shard on every module that has weights of its own",
        contender="fsdp2:FSDP2",
        options={"per_weight": True},
    ),
    "tp": Peer(
        about="torch DTensor tensor parallel by the model's plan, sequence and loss parallel; one batch for all ranks",
        contender="tensor_parallel:TensorParallel",
    ),
    "fsdp2-tp": Peer(
        about="tp over two neighbours, and fully_shard over the others (2-D, as torchtitan has it)",
        contender="tensor_parallel:FSDP2AroundTensorParallel",
    ),
    "pipeline-fsdp2": Peer(
        about="torch's Schedule1F1B over two stages, fully_shard inside of each, gathered per micro-batch",
        contender="pipeline_fsdp2:PipelineFSDP2",
    ),
    "pipeline-fsdp2-keep": Peer(
        about="pipeline-fsdp2 with reshard_after_forward=False: gathered once a step, kept for all micro-batches",
        contender="pipeline_fsdp2:PipelineFSDP2",
        options={"keep": True},
    ),
    "rtp-own-loop": Peer(
        about="rtp=N called as model(**batch) with loss.backward(), in place of forward_backward",
        contender="own_loop:OwnLoop",
    ),
    "rtp-own-loop-messages": Peer(
        about="rtp-own-loop over messages",
        contender="own_loop:OwnLoop",
        options={"parallel": "rtp={n}[transport=send_receive]"},
    ),
    "hf-fsdp2": Peer(
        about="transformers' DistributedConfig(fsdp_size=N): fully_shard by the model's plan",
        contender="hugging_face:HuggingFace",
        library="transformers",
    ),
    "hf-ep": Peer(
        about="transformers' DistributedConfig(fsdp_size=N, ep_size=N): hf-fsdp2 whose experts stay, and tokens travel",
        contender="hugging_face:HuggingFaceExperts",
        library="transformers",
    ),
    "hf-tp": Peer(
        about="transformers' DistributedConfig(tp_size=N): tensor parallel by the model's plan, one batch",
        contender="hugging_face:HuggingFace",
        library="transformers",
        sharded=False,  # by its plan only, which it checks itself: GPT-NeoX's leaves out the embedding
        options={"tensor_parallel": True},
    ),
    "deepspeed-zero3": Peer(
        about="DeepSpeed ZeRO-3, buckets and thresholds by the hidden size, as Hugging Face's Trainer sets them",
        contender="deepspeed_zero3:DeepSpeedZero3",
        library="deepspeed",
        loads_later=_OF_DEEPSPEED,
        environment={"DS_ACCELERATOR": "cpu"},
    ),
    "deepspeed-zero3-lean": Peer(
        about="DeepSpeed ZeRO-3 that keeps no weight gathered: live parameters 1, reuse distance 0, persistence 0",
        contender="deepspeed_zero3:DeepSpeedZero3",
        library="deepspeed",
        loads_later=_OF_DEEPSPEED,
        options={"lean": True},
        environment={"DS_ACCELERATOR": "cpu"},
    ),
    "accelerate-fsdp2": Peer(
        about="Accelerate with its FSDP2 plugin, on CPU ranks set by hand",
        contender="accelerate_fsdp2:AccelerateFSDP2",
        library="accelerate",
        loads_later=("deepspeed",),
        environment={"DS_ACCELERATOR": "cpu"},
    ),
}


def find_peer(name: str) -> Peer:
    """Returns a peer that is installed.

    Raises:
        ConfigError: there is none of that name, or its library is not installed.
    """
    if name not in PEERS:
        raise ConfigError(
            f"bench: unknown peer {name!r}{nearest(name, known=PEERS)}. Peers: {', '.join(PEERS)}; "
            "layouts of rotorch go to --parallel"
        )
    peer = PEERS[name]
    if not peer.installed:
        raise ConfigError(f"bench: --peer {name}: {how_to_install(peer)}")
    return peer


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module.partition(".")[0]) is not None


def how_to_install(peer: Peer) -> str:
    """Returns the command that installs a missing library, in one line."""
    return f"{peer.library} is not installed. Write: pip install 'rotorch[peers]'"


def help_text() -> str:
    """Lists all peers, for `rotorch bench --help`."""
    return "; ".join(f"{name}: {peer.about}" for name, peer in PEERS.items())
