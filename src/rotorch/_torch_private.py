"""Every underscore name of torch that rotorch uses, each with its reason.

`tests/test_torch_private.py` holds each one.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.autograd import Variable
from torch.autograd.graph import Node
from torch.distributed import _state_dict_utils
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

TRUNCATED_NORMAL = "_no_grad_trunc_normal_"
"""Name in `torch.nn.init` of what `trunc_normal_` calls, wherever that was imported to.

Reason: since torch 2.13 `trunc_normal_` does nothing to a meta tensor, so only a stand-in hears of it.
"""

FUSED_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}
"""What `scaled_dot_product_attention` comes to, on all devices.

Reason: a dispatch mode sees these, never the public function, which is made of them (see `ops/keep_attention.py`).
"""

CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
"""Attention on CPU, whose products are inside of one operation; its backward takes the output's gradient first.

Reason: who counts products below autograd (`bench/device_clock.py`) sees these only; and attention in two parts
(`models/attend_last.py`) needs the sums of exponentials, which the public function keeps to itself.
"""

GLOO_THREADS = {"gloo_tcp_loop", "pt_gloo_runloop"}
"""Names of the threads that a gloo process group starts: what sends and receives, and what runs collectives.

Reason: torch gives no other way to tell them from a process's other threads.
"""

AUTOGRAD_THREADS = "pt_autograd_"
"""Prefix of the names of the threads that autograd starts for devices other than the CPU.

Reason: a process that has them cannot fork ranks that compute gradients, and torch tells only the forked process.
"""

# TorchDispatchMode: the documented way to observe operations below autograd, but only exported from an underscore
# module.
# tree_flatten, tree_unflatten: arguments and outputs of unmodified modules are nested tuples, dicts and dataclasses
# registered with torch's own pytree; optree would not know Hugging Face's output classes.
__all__ = [
    "ASKS_FOR_VALUES",
    "AUTOGRAD_THREADS",
    "CPU_ATTENTION",
    "CPU_ATTENTION_BACKWARD",
    "FUSED_ATTENTION",
    "GLOO_THREADS",
    "TRUNCATED_NORMAL",
    "FakeTensor",
    "LightDispatchMode",
    "TorchDispatchMode",
    "add_to_each",
    "as_dtensor_class",
    "as_one_message",
    "as_parameter",
    "assert_on_device",
    "before_sums_of_gradients",
    "copies_its_own_cut",
    "copy_each",
    "default_store",
    "fake_store",
    "fake_tensors",
    "flat_group",
    "flight_record",
    "forget_fully_sharded",
    "forget_meshes",
    "functional_collectives",
    "graph_task",
    "group_size",
    "group_timeout",
    "has_hooks_after_accumulation",
    "hooks_of_gradient",
    "import_what_steps_need",
    "in_backward",
    "lost_gpu_by_fork",
    "put_hooks_after_accumulation",
    "put_hooks_of_gradient",
    "saved_tensor_hooks",
    "set_group_timeout",
    "storage_key",
    "sums_are_complete",
    "symmetric_backend",
    "symmetric_empty",
    "symmetric_rendezvous",
    "take_hooks_after_accumulation",
    "take_hooks_of_gradient",
    "tree_flatten",
    "tree_unflatten",
    "when_backward_ends",
    "will_be_run",
    "wrapper_tensor",
]


class LightDispatchMode(TorchDispatchMode):
    """A dispatch mode for where nothing is compiled; it hears of an operation sooner.

    Reason: torch has its compiler pass over what a dispatch mode does, operation by operation, which takes longer than
    the mode does if that is little. What says no to it has an underscore.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def assert_on_device(condition: Tensor, message: str) -> None:
    """Stops a GPU where a condition does not hold, as its own kernels do for an index out of bounds.

    Reason: asking for the value would let the host wait for the device; torch compiles the same call from `assert`.
    """
    torch._assert_async(condition, message)


def functional_collectives() -> Any:
    """The module whose `wait_tensor` DTensor calls, by its name there, to wait for what it has sent for.

    Reason: only a wrapper in that place hears of these waits (see `comm/observe.py`).
    """
    return importlib.import_module("torch.distributed._functional_collectives")  # by name: nothing here sends by it


def flight_record() -> dict[str, Any]:
    """Returns torch's record of this process's last collectives: `{"entries": [...], "pg_status": {...}}`.

    Empty where this torch records nothing, or was told not to (`TORCH_FR_BUFFER_SIZE=0`).

    Reason: torch offers its flight recorder to its own debugger only.
    """
    from torch._C import _distributed_c10d

    return json.loads(_distributed_c10d._dump_fr_trace_json())


def as_one_message(group: dist.ProcessGroup) -> Any:
    """A context in which collectives of one kind are collected and then issued as one; its value has their `wait`.

    Reason: gathers of many weights, each into its own memory, are one message so, without a copy; no public name
    collects them.
    """
    return dist.distributed_c10d._coalescing_manager(group=group, async_ops=True)


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies several tensors, each in place, also into another dtype, in one launch of a GPU where that can be.

    Reason: torch's functions of lists have no public names.
    """
    if targets:  # torch refuses empty lists
        torch._foreach_copy_(targets, sources)


def add_to_each(targets: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Adds a tensor to each of several, in place, in one launch of a GPU where that can be.

    Reason: see `copy_each`.
    """
    if targets:
        torch._foreach_add_(targets, others)


def group_size(name: str) -> int:
    """Number of ranks of a process group by its name.

    Reason: operations that DTensor issues name their group; no public function finds one by its name.
    """
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(name).size()


def group_timeout(group: dist.ProcessGroup, *, device: torch.device) -> timedelta:
    """Time after which operations of a process group on a device's tensors fail.

    Reason: a group made beside another one should wait as long, and no public name tells how long that is.
    """
    options = getattr(group._get_backend(device), "options", None)  # torch's fake backend has none, and never waits
    return getattr(options, "_timeout", timedelta(minutes=10))


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta, *, device: torch.device) -> None:
    """Has operations of a process group on a device's tensors fail after `timeout`.

    Reason: the groups of a device mesh's axes wait half an hour, whatever the group of all ranks does, and nothing
    public makes them wait for less.
    """
    backend = group._get_backend(device)
    if hasattr(backend, "_set_default_timeout"):  # torch's fake backend has none, and never waits
        backend._set_default_timeout(timeout)


def storage_key(of: Tensor | torch.UntypedStorage) -> int:
    """Identity of a storage, or of a tensor's storage, shared by all its views.

    Reason: meta tensors all have `data_ptr() == 0`, so no public name tells one meta storage from another.
    """
    return (of.untyped_storage() if isinstance(of, Tensor) else of)._cdata


def in_backward() -> bool:
    """True while the calling thread runs a backward pass.

    Reason: a dispatch mode sees operations of forward and of backward alike, and no public name tells them apart.
    """
    return torch._C._current_graph_task_id() != -1


def graph_task() -> int:
    """Number of the backward pass that the calling thread runs at this moment; -1 outside of one.

    Reason: a backward that broke off never says so; another number tells that it is over.
    """
    return torch._C._current_graph_task_id()


def when_backward_ends(call: Callable[[], None]) -> None:
    """Has the backward pass that runs at this moment call `call` once all its gradients are there.

    What other libraries (DDP, fully_shard) have asked for in this pass comes before it.

    Reason: a loop calls `loss.backward()` of torch, and no public name tells when that has ended.
    """
    engine = Variable._execution_engine
    engine.queue_callback(lambda: engine.queue_callback(call))


def will_be_run(node: Node) -> bool:
    """True if the backward pass that runs at this moment comes to `node` of its graph.

    Reason: `torch.autograd.grad` asks for some gradients only, and no public name tells for which.
    """
    return torch._C._will_engine_execute_node(node)


def hooks_of_gradient(parameter: Tensor) -> list[Callable[[Tensor], Tensor | None]]:
    """Returns the hooks that `register_hook` has put on a tensor.

    Reason (of this and the next five): autograd calls them at leaves of its graph, which parameters at rest are not.
    """
    return list((parameter._backward_hooks or {}).values())


def take_hooks_of_gradient(parameter: Tensor) -> Any:
    """Takes off a tensor what `register_hook` has put on it; returns it, to be put back, or None."""
    hooks = parameter._backward_hooks
    if hooks:
        parameter._backward_hooks = None
    return hooks or None


def put_hooks_of_gradient(parameter: Tensor, hooks: Any) -> None:
    """Puts back what `take_hooks_of_gradient` took: the same object, by which handles find their hook."""
    parameter._backward_hooks = hooks


def has_hooks_after_accumulation(parameter: Tensor) -> bool:
    """True if `register_post_accumulate_grad_hook` has put any on a tensor."""
    return bool(parameter._post_accumulate_grad_hooks)


def take_hooks_after_accumulation(parameter: Tensor) -> tuple[Any, dict[int, Any]] | None:
    """Takes off a tensor what `register_post_accumulate_grad_hook` has put on it, to be put back; None: nothing.

    Emptied too: autograd goes on calling what is in the object that it was given.
    """
    hooks = parameter._post_accumulate_grad_hooks
    if hooks is None:
        return None
    inside = dict(hooks)
    hooks.clear()
    parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]
    return hooks, inside


def put_hooks_after_accumulation(parameter: Tensor, taken: tuple[Any, dict[int, Any]]) -> None:
    """Puts back what `take_hooks_after_accumulation` took: the same object, by which handles find their hook."""
    hooks, inside = taken
    hooks.update(inside)
    parameter._post_accumulate_grad_hooks = hooks


def saved_tensor_hooks() -> tuple[Any, Any] | None:
    """The hooks (of activation checkpointing) that receive the tensors which autograd saves at this moment, if any.

    Reason: hooks can be pushed by a public name, but no public name tells whether there are any.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[no-any-return]


def wrapper_tensor(cls: type[Tensor], shape: Sequence[int], *, like: Tensor) -> Any:
    """Makes an instance of a tensor subclass that has a shape, and `like`'s dtype and device, but no memory.

    Reason: the documented way to write a tensor subclass that stands for other tensors is a method with an underscore.
    """
    return Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=like.dtype, device=like.device)


def as_dtensor_class(cls: type[Tensor], dtensor: Any, *, local: Tensor | None = None) -> Any:
    """An instance of a subclass of DTensor over the local tensor of a DTensor, or over another one like it.

    Reason: a subclass may be dispatched as its own, but no public name makes one; torch's own `from_local` makes
    DTensors only, and their mesh, placements and shape together have an underscore.
    """
    if local is not None:
        return cls(local, dtensor._spec, requires_grad=False)
    return cls(dtensor._local_tensor, dtensor._spec, requires_grad=dtensor.requires_grad)


def as_parameter(dtensor: Tensor, *, requires_grad: bool) -> nn.Parameter:
    """Makes a DTensor, which nothing else holds, a parameter itself.

    Reason: `nn.Parameter(dtensor)` detaches it, and for that DTensor works out a sharding, anew for each shape in each
    process: 20 ms each, a quarter of the time of `parallelize` for a small model.
    """
    dtensor.requires_grad_(requires_grad)._is_param = True  # type: ignore[attr-defined]
    return cast(nn.Parameter, dtensor)


def copies_its_own_cut(frame: FrameType) -> bool:
    """True for a call of torch that writes torch's cut of a whole tensor into this rank's part of a DTensor.

    Reason: `set_model_state_dict(..., broadcast_from_rank0=True)` does so with every DTensor parameter, whatever it is
    cut like, and asks nothing but whether it is on the meta device.
    """
    return frame.f_code is _state_dict_utils._distribute_tensors.__code__


def default_store() -> dist.Store:
    """The store that the default process group was made with.

    Reason: who calls `parallelize` may have made the group, and torch gives its store to nobody. What ranks compare
    before they build anything goes through it (`comm/agreement.py`): a collective of ranks that differ would hang.
    """
    return dist.distributed_c10d._get_default_store()


def fake_store() -> Any:
    """Registers the process group backend "fake", which does nothing, and makes the store that it starts from.

    Reason: torch keeps it with its own tests.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def fake_tensors() -> Any:
    """A context in which tensors have shapes, storages and a device, but no memory.

    Reason: what passes keep and take is counted in a run on such tensors (`traced/passes.py`); on the meta device
    attention takes another kernel, which keeps other things.
    """
    return FakeTensorMode()


ASKS_FOR_VALUES = (DynamicOutputShapeException, DataDependentOutputException)
"""Raised in such a context by an operation whose result depends on numbers. Reason: they have no public name."""


def flat_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Makes one axis of all axes of a mesh, which keeps it; returns its group. All ranks of the mesh.

    Reason: DTensor sums over several axes in one message if their mesh has been made flat, and else warns that it
    would be better; it says so by this name.
    """
    return mesh._flatten().get_group()


def import_what_steps_need() -> None:
    """Has torch import the modules of an optimizer's first step now: seconds, and memory that forks share.

    Reason: a step itself would do so, too, but since torch 2.13 it asks for the stream of a GPU if there is one in
    sight, wherever its parameters lie, and no process forked after that could use it.
    """
    importlib.import_module("torch._dynamo")


def forget_meshes() -> None:
    """Forgets how DTensors of this process were computed with, and over which meshes.

    Reason: DTensor takes two meshes of one shape for the same, and then sends by the names of the first one's groups,
    which may be gone; no public name empties that cache.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


def lost_gpu_by_fork() -> bool:
    """True if this process was forked from one that had used CUDA, or asked for devices, so that this one cannot.

    Reason: torch says so in public only by an error once CUDA is used.
    """
    return bool(torch.cuda._is_in_bad_fork())


def forget_fully_sharded(module: nn.Module) -> Callable[[], None]:
    """Has torch forget that `fully_shard` was called for a module and its parts; returns what takes that back.

    Reason: it may be called once for a module, which torch keeps in a table of its own, beside the module.
    """
    from torch.distributed._composable_state import _module_state_mapping as states

    found = {part: states[part] for part in module.modules() if part in states}
    for part in found:
        del states[part]
    return lambda: states.update(found)


def before_sums_of_gradients(module: nn.Module, call: Callable[[list[tuple[Tensor, nn.Parameter]]], None]) -> None:
    """Has a `fully_shard` module call `call` right before it sums gradients, with its trained weights: at rest, whole.

    Reason: it leaves weights without a gradient out of its message, which other ranks' messages may contain. Newer
    versions of torch have a switch for this; none says which weights had none.
    """
    for group in module._get_fsdp_state()._fsdp_param_groups:  # type: ignore[operator, union-attr]

        def post_backward(*args: Any, group: Any = group, own: Callable[..., None] = group.post_backward) -> None:
            gathered = [each for each in group.fsdp_params if hasattr(each, "_unsharded_param")]
            call([(e.sharded_param, e._unsharded_param) for e in gathered if e._unsharded_param.requires_grad])
            own(*args)

        group.post_backward = post_backward


def sums_are_complete(wrapped: nn.parallel.DistributedDataParallel) -> bool:
    """True if DDP has summed all gradients of its last backward.

    Reason: where that left a weight out, DDP says so only in its next forward, when a step has used what is not summed.
    """
    try:
        wrapped.reducer._check_reducer_finalized()
    except RuntimeError:
        return False
    return True


def symmetric_backend(device: torch.device) -> str | None:
    """The backend of torch's symmetric memory for a device ("CUDA", "NVSHMEM", "NCCL"); None if there is none.

    Reason (of this and the next two): torch offers memory that several GPUs map only in a module with an underscore.
    """
    from torch.distributed._symmetric_memory import get_backend

    return get_backend(device)


def symmetric_empty(numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocates a flat tensor that peers can map. The same `numel` on all ranks."""
    from torch.distributed._symmetric_memory import empty

    return empty(numel, dtype=dtype, device=device)


def symmetric_rendezvous(tensor: Tensor, group: dist.ProcessGroup) -> Any:
    """Maps the tensors of all ranks of `group`, which all call it; returns torch's handle to them."""
    from torch.distributed._symmetric_memory import rendezvous

    return rendezvous(tensor, group)
