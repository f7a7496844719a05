"""Each underscore name of torch that is used is still what it was, one by one: a new torch says which has moved."""

import ast
import inspect
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from rotorch import _torch_private
from rotorch._torch_private import (
    ASKS_FOR_VALUES,
    AUTOGRAD_THREADS,
    CPU_ATTENTION,
    CPU_ATTENTION_BACKWARD,
    FUSED_ATTENTION,
    GLOO_THREADS,
    TRUNCATED_NORMAL,
    FakeTensor,
    LightDispatchMode,
    TorchDispatchMode,
    add_to_each,
    as_dtensor_class,
    as_one_message,
    as_parameter,
    assert_on_device,
    before_sums_of_gradients,
    copies_its_own_cut,
    copy_each,
    default_store,
    fake_store,
    fake_tensors,
    flat_group,
    flight_record,
    forget_fully_sharded,
    forget_meshes,
    functional_collectives,
    graph_task,
    group_size,
    group_timeout,
    has_hooks_after_accumulation,
    hooks_of_gradient,
    import_what_steps_need,
    in_backward,
    lost_gpu_by_fork,
    put_hooks_after_accumulation,
    put_hooks_of_gradient,
    saved_tensor_hooks,
    set_group_timeout,
    storage_key,
    sums_are_complete,
    symmetric_backend,
    symmetric_empty,
    symmetric_rendezvous,
    take_hooks_after_accumulation,
    take_hooks_of_gradient,
    tree_flatten,
    tree_unflatten,
    when_backward_ends,
    will_be_run,
    wrapper_tensor,
)
from rotorch.comm.axis_group import AxisGroup
from rotorch.comm.meter import Meter
from rotorch.core.traffic import Kind
from rotorch.testing.fake import as_rank
from rotorch.testing.ranks import run_ranks


def test_everything_it_offers_is_tested_here():
    imported = {
        alias.name
        for node in ast.walk(ast.parse(Path(__file__).read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module == "rotorch._torch_private"
        for alias in node.names
    }
    assert imported == set(_torch_private.__all__)


class OtherDTensor(DTensor):
    """Dispatched as its own."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func._schema.name == "aten::neg":
            return torch.full((1,), 7.0)
        return super().__torch_dispatch__(func, types, args, kwargs)


def test_as_dtensor_class_makes_a_subclass_over_the_same_memory_that_is_dispatched_as_its_own():
    with as_rank(0, num_ranks=2):
        local = torch.ones(2, 3)
        plain = DTensor.from_local(local, init_device_mesh("cpu", (2,)), [Shard(0)])
        made = as_dtensor_class(OtherDTensor, plain)
        assert type(made) is OtherDTensor and made.shape == (4, 3) and made.placements == (Shard(0),)
        assert torch.equal(-made, torch.full((1,), 7.0))
        made.mul_(3)
        assert torch.equal(local, torch.full((2, 3), 3.0))
        other = as_dtensor_class(OtherDTensor, plain, local=torch.zeros(2, 3))
        assert other.shape == (4, 3) and torch.equal(other.to_local(), torch.zeros(2, 3))


def test_as_parameter_makes_what_nn_parameter_makes():
    with as_rank(0, num_ranks=2):
        mesh, local = init_device_mesh("cpu", (2,)), torch.ones(2, 3)
        made = as_parameter(DTensor.from_local(local, mesh, [Shard(0)]), requires_grad=True)
        theirs = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)]))
        assert isinstance(made, nn.Parameter) and type(made) is type(theirs) is DTensor
        assert made.is_leaf and made.requires_grad and vars(made).keys() == vars(theirs).keys()
        assert made.to_local().data_ptr() == local.data_ptr()
        (2 * made).to_local().sum().backward()
        assert torch.equal(made.grad.to_local(), torch.full((2, 3), 2.0))
        assert not as_parameter(DTensor.from_local(local, mesh, [Shard(0)]), requires_grad=False).requires_grad


class AsksWhoLooks(DTensor):
    @property
    def is_meta(self):
        self.told = copies_its_own_cut(sys._getframe(1))
        return self.told


def test_copies_its_own_cut_knows_the_call_of_set_model_state_dict():
    with as_rank(0, num_ranks=2):
        plain = DTensor.from_local(torch.ones(2, 3), init_device_mesh("cpu", (2,)), [Shard(0)])
        ours = as_dtensor_class(AsksWhoLooks, plain)
        state = {"weight": (ours, torch.arange(12.0).reshape(4, 3))}
        torch.distributed._state_dict_utils._distribute_tensors(state, ["weight"], torch.device("cpu"))
        assert ours.told and type(state["weight"]) is DTensor
        assert torch.equal(ours.to_local(), torch.ones(2, 3))
        assert not ours.is_meta


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_scaled_dot_product_attention_is_a_fused_operation_that_says_whether_it_drops():
    q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
    found = []

    class Finds(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found.extend([func] if func in FUSED_ATTENTION else [])
            return func(*args, **(kwargs or {}))

    with Finds():
        nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert len(found) == 1
    for operation in FUSED_ATTENTION:
        assert "dropout_p" in [argument.name for argument in operation._schema.arguments]


def test_attention_on_cpu_is_one_operation_in_forward_and_one_in_backward_that_takes_the_gradient_first():
    q = torch.randn(1, 2, 8, 16, requires_grad=True)
    with Names() as names:
        nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()
    for packet in (CPU_ATTENTION, CPU_ATTENTION_BACKWARD):
        assert names.seen.count(packet.default._schema.name) == 1
    given = [argument.name for argument in CPU_ATTENTION_BACKWARD.default._schema.arguments]
    assert given[:4] == ["grad_out", "query", "key", "value"]


def test_a_dispatch_mode_sees_operations_of_forward_and_backward_and_says_which_argument_is_written():
    x = torch.ones(3, requires_grad=True)
    with Names() as names:
        (x * 2).sum().backward()
        torch.empty(2).normal_()
    assert {"aten::mul", "aten::sum", "aten::empty", "aten::normal_"} <= set(names.seen)
    assert names.seen.count("aten::mul") == 2  # the second in backward
    written = [
        a.name for a in torch.ops.aten.normal_.default._schema.arguments if a.alias_info and a.alias_info.is_write
    ]
    assert written == ["self"]


def test_a_condition_on_a_device_stops_with_a_message():
    assert_on_device(torch.tensor(True), "holds")
    with pytest.raises(RuntimeError, match="does not hold"):
        assert_on_device(torch.tensor(False), "does not hold")


def test_a_light_dispatch_mode_sees_them_too_and_is_not_wrapped_for_the_compiler():
    def light(self, func, types, args=(), kwargs=None):
        seen.append(func._schema.name)
        return func(*args, **(kwargs or {}))

    seen = []
    mode = type("Light", (LightDispatchMode,), {"__torch_dispatch__": light})
    assert mode.__torch_dispatch__ is light
    assert type("Other", (TorchDispatchMode,), {"__torch_dispatch__": light}).__torch_dispatch__ is not light
    with mode():
        (torch.ones(3, requires_grad=True) * 2).sum().backward()
    assert seen.count("aten::mul") == 2


def test_a_storage_is_known_by_its_key_on_any_device():
    for device in ("cpu", "meta"):
        one, two = (torch.empty(4, device=device) for _ in range(2))
        assert storage_key(one) == storage_key(one[1:].view(3)) == storage_key(one.untyped_storage())
        assert storage_key(one) != storage_key(two)
    assert storage_key(nn.Parameter(one)) == storage_key(one)


def test_trees_hold_nested_containers_and_model_outputs():
    from transformers.modeling_outputs import CausalLMOutputWithPast

    x = torch.ones(1)
    leaves, tree = tree_flatten({"a": (x, [1, None]), "b": CausalLMOutputWithPast(logits=x)})
    assert sum(leaf is x for leaf in leaves) == 2
    again = tree_unflatten(leaves, tree)
    assert again["a"] == (x, [1, None]) and isinstance(again["b"], CausalLMOutputWithPast) and again["b"].logits is x


def test_a_thread_knows_whether_it_runs_a_backward_pass():
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x * 1
    y.register_hook(lambda grad: seen.append(in_backward()))
    assert not in_backward()
    y.sum().backward()
    assert seen == [True]
    assert not in_backward()


def test_it_is_known_whether_saved_tensors_are_hooked():
    assert saved_tensor_hooks() is None
    hooks = torch.relu, torch.sigmoid
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        assert saved_tensor_hooks() == hooks
    assert saved_tensor_hooks() is None


def test_the_first_step_of_an_optimizer_has_nothing_left_to_import():
    code = """
import sys, torch
from rotorch._torch_private import import_what_steps_need
import_what_steps_need()
before = set(sys.modules)
weight = torch.nn.Parameter(torch.zeros(1))
weight.sum().backward()
torch.optim.AdamW([weight], fused=True).step()
print(len(set(sys.modules) - before))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(found.stdout) < 10  # 200 otherwise
    import_what_steps_need()  # once more does no harm


def test_a_process_that_was_forked_is_told_whether_cuda_is_lost():
    assert lost_gpu_by_fork() is False  # nobody has used it here


def names_of_threads():
    dist.all_reduce(torch.ones(1))  # a thread names itself when it first runs
    return {(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}


@pytest.mark.skipif(sys.platform != "linux", reason="threads are listed in /proc")
def test_a_gloo_group_starts_threads_of_these_names():
    for names in run_ranks(names_of_threads, num_ranks=2):
        assert names >= GLOO_THREADS


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this torch has no devices besides CPUs")
def test_autograd_starts_threads_of_these_names():
    code = """
from pathlib import Path
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():  # where there is no GPU it puts some in its place
    torch.empty(1)
torch.ones(1, requires_grad=True).sum().backward()
print(*(task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert AUTOGRAD_THREADS in found.stdout


def test_a_wrapper_has_a_shape_and_no_memory():
    class Shape(Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise AssertionError(f"{func} on nothing")

    like = torch.empty(2, dtype=torch.float16)
    made = wrapper_tensor(Shape, (1 << 30, 1 << 10), like=like)
    assert isinstance(made, Shape) and isinstance(made, Tensor)
    assert (tuple(made.shape), made.dtype, made.device) == ((1 << 30, 1 << 10), like.dtype, like.device)


def test_a_truncated_normal_is_drawn_by_one_function_wherever_its_caller_comes_from(monkeypatch):
    signature = inspect.signature(getattr(nn.init, TRUNCATED_NORMAL))
    assert list(signature.parameters) == ["tensor", "mean", "std", "a", "b", "generator"]
    before, calls = nn.init.trunc_normal_, []
    monkeypatch.setattr(nn.init, TRUNCATED_NORMAL, lambda *args, **kwargs: calls.append(args[1:5]))
    before(torch.empty(2, device="meta"), mean=0.5, std=2.0, a=-1.0, b=1.0)
    assert calls == [(0.5, 2.0, -1.0, 1.0)]


def gathered_as_one():
    parts = [torch.full((2,), float(dist.get_rank())), torch.full((3,), 10.0 + dist.get_rank())]
    wholes = [torch.empty(4), torch.empty(6)]
    with as_one_message(dist.group.WORLD) as message:
        for whole, part in zip(wholes, parts, strict=True):
            dist.all_gather_single(whole, part)
    message.wait()
    return [whole.tolist() for whole in wholes]


def test_functions_of_lists_write_in_place_and_convert():
    flat = torch.zeros(5, dtype=torch.bfloat16)
    copy_each([flat[:2], flat[3:]], [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])])
    add_to_each([flat[:2], flat[3:]], [torch.ones(2, dtype=torch.bfloat16), flat[:2].clone()])
    copy_each([], [])
    add_to_each([], [])
    assert flat.tolist() == [2.0, 3.0, 0.0, 4.0, 6.0]


def test_collectives_of_one_kind_become_one_message():
    for found in run_ranks(gathered_as_one, num_ranks=2):
        assert found == [[0.0, 0.0, 1.0, 1.0], [10.0] * 3 + [11.0] * 3]


def test_a_fake_group_has_any_size_and_does_nothing():
    dist.init_process_group("fake", store=fake_store(), rank=5, world_size=1000)
    try:
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert (dist.get_rank(), dist.get_world_size(), tensor.tolist()) == (5, 1000, [1.0, 1.0])
    finally:
        dist.destroy_process_group()


def test_the_default_group_has_the_store_that_it_was_made_with():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        default_store().set("said", "here")
        assert default_store().get("said") == b"here"
    finally:
        dist.destroy_process_group()


def test_a_group_is_found_by_its_name():
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=4)
    try:
        assert group_size(dist.group.WORLD.group_name) == 4
        assert group_size(dist.new_group([0, 2]).group_name) == 2
    finally:
        dist.destroy_process_group()


def test_symmetric_memory_is_where_it_was_and_not_for_cpu(tmp_path):
    assert symmetric_backend(torch.device("cpu")) is None
    with pytest.raises(RuntimeError, match="does not support device type cpu"):
        symmetric_empty(4, dtype=torch.float32, device=torch.device("cpu"))
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="does not support device type cpu"):
            symmetric_rendezvous(torch.empty(4), dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def test_a_handle_of_symmetric_memory_has_what_rings_call():
    handle = torch._C._distributed_c10d._SymmetricMemory
    for name in ("rank", "get_buffer", "get_signal_pad", "put_signal", "wait_signal", "barrier"):
        assert hasattr(handle, name), name
    # Arguments by position, as the bindings say: buffers count elements, channels come after the rank.
    documented = {name: getattr(handle, name).__doc__ for name in ("get_buffer", "get_signal_pad", "put_signal")}
    assert "rank: " in documented["get_buffer"] and "storage_offset: " in documented["get_buffer"]
    assert documented["get_signal_pad"].index("dtype: ") < documented["get_signal_pad"].index("storage_offset: ")
    assert documented["put_signal"].index("dst_rank: ") < documented["put_signal"].index("channel: ")


def norm_of_ones():
    """Of a DTensor over a grid of four ranks that have a one each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    ones = DTensor.from_local(torch.ones(1, 1), mesh, [Shard(0), Shard(1)], run_check=False)
    return float(torch.linalg.vector_norm(ones).full_tensor())


def test_meshes_are_forgotten_over_which_dtensors_were_computed_with():
    """The groups of an equal mesh had other names, which ranks would look for."""
    with as_rank(0, num_ranks=4):
        for _ in range(3):
            dist.new_group([0, 1])
        norm_of_ones()
    forget_meshes()
    assert run_ranks(norm_of_ones, num_ranks=4) == pytest.approx([2.0] * 4, rel=1e-6)


def test_a_module_can_be_fully_sharded_again_once_that_is_forgotten():
    with as_rank(0, num_ranks=2):
        mesh = init_device_mesh("cpu", (2,))
        module = torch.nn.Linear(2, 2)
        own, attributes = type(module), vars(module).copy()
        fully_shard(module, mesh=mesh)
        remember = forget_fully_sharded(module)
        remember()
        assert isinstance(module, FSDPModule)
        module.unshard()  # finds its state
        forget_fully_sharded(module)
        module.__class__ = own
        vars(module).clear()
        vars(module).update(attributes, _parameters={"weight": torch.nn.Parameter(torch.ones(2, 2)), "bias": None})
        fully_shard(module, mesh=mesh)
        assert isinstance(module, FSDPModule)


def test_ddp_says_whether_it_has_summed_all_gradients():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for module, complete in ((OneOfTwo(), False), (nn.Linear(2, 2), True)):
            wrapped = nn.parallel.DistributedDataParallel(module)
            wrapped(torch.ones(1, 2)).sum().backward()
            assert sums_are_complete(wrapped) == complete
    finally:
        dist.destroy_process_group()


class OneOfTwo(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)

    def forward(self, x):
        return self.used(x)


def test_weights_that_no_backward_has_reached_are_shown_before_gradients_are_summed():
    seen = []
    with as_rank(0, num_ranks=2):
        module = OneOfTwo()
        module.spare.bias.requires_grad_(False)
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
        before_sums_of_gradients(module, lambda group: seen.extend((at_rest, w.grad) for at_rest, w in group))
        module(torch.ones(1, 2)).sum().backward()
        reached = {id(at_rest): gradient is not None for at_rest, gradient in seen}
        assert reached == {id(module.used.weight): True, id(module.spare.weight): False}


def test_a_mesh_made_flat_has_a_group_of_all_its_ranks():
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=4)
    try:
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        assert flat_group(mesh).size() == 4
    finally:
        dist.destroy_process_group()


def test_a_group_tells_how_long_it_waits(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=77))
    try:
        cpu = torch.device("cpu")
        assert group_timeout(dist.group.WORLD, device=cpu) == timedelta(seconds=77)
        shorter = dist.new_group([0], timeout=timedelta(seconds=5))
        assert group_timeout(shorter, device=cpu) == timedelta(seconds=5)
        set_group_timeout(shorter, timedelta(seconds=9), device=cpu)
        assert group_timeout(shorter, device=cpu) == timedelta(seconds=9)
    finally:
        dist.destroy_process_group()


def test_a_fake_group_says_something_of_how_long_it_waits():
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=4)
    try:
        assert group_timeout(dist.group.WORLD, device=torch.device("cpu")) > timedelta(0)
        set_group_timeout(dist.group.WORLD, timedelta(seconds=9), device=torch.device("cpu"))  # changes nothing
    finally:
        dist.destroy_process_group()


def test_dtensor_waits_by_a_function_that_a_wrapper_can_stand_before(tmp_path, monkeypatch):
    waited = []
    functional = functional_collectives()
    original = functional.wait_tensor
    monkeypatch.setattr(functional, "wait_tensor", lambda tensor: waited.append(1) or original(tensor))
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        reduced = functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
        assert float((reduced + 1.0).sum()) == 8.0
    finally:
        dist.destroy_process_group()
    assert waited


def test_collectives_are_recorded(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "ranks"), 1), rank=0, world_size=1)
    dist.all_reduce(torch.ones(3))
    deadline = time.monotonic() + 10
    while not (last := flight_record()["entries"][-1])["retired"] and time.monotonic() < deadline:
        time.sleep(0.01)  # another thread notes it
    assert last["profiling_name"] == "gloo:all_reduce" and last["input_sizes"] == [[3]] and last["retired"] is True
    assert {"process_group", "collective_seq_id", "p2p_seq_id", "is_p2p", "state"} <= set(last)


def test_collectives_of_one_kind_go_as_one_message():
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=2)
    try:
        line = AxisGroup("all", 2, 0, dist.group.WORLD)
        parts, wholes = [torch.ones(2), torch.ones(3)], [torch.ones(4), torch.ones(6)]
        with Meter(smallest_counted_bytes=1) as meter:
            line.gather_each(wholes, parts)()
            line.sum_each(parts, wholes)()
    finally:
        dist.destroy_process_group()
    assert meter.num_messages == {Kind.ALL_GATHER: 1, Kind.REDUCE_SCATTER: 1} and not meter.not_counted
    assert meter.sent_bytes == {Kind.ALL_GATHER: 4 * 5, Kind.REDUCE_SCATTER: 4 * 5}


def test_the_end_of_a_backward_is_told_once_gradients_are_there():
    x, heard = torch.ones(2, requires_grad=True), []
    y = x * 2
    y.register_hook(lambda _: when_backward_ends(lambda: heard.append((graph_task(), x.grad.tolist()))))
    assert graph_task() == -1
    y.sum().backward()
    (found,) = heard
    assert found[0] >= 0 and found[1] == [2.0, 2.0]


def test_a_backward_says_which_nodes_it_will_run():
    x, w, heard = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True), []
    y = x * w
    accumulates = torch.autograd.graph.get_gradient_edge(w).node
    y.register_hook(lambda _: heard.append(will_be_run(accumulates)))
    torch.autograd.grad(y.sum(), [x], retain_graph=True)
    y.sum().backward()
    assert heard == [False, True]


def test_hooks_on_parameters_are_found_and_taken_off_for_a_while():
    parameter, heard = nn.Parameter(torch.ones(2)), []
    assert hooks_of_gradient(parameter) == [] and not take_hooks_after_accumulation(parameter)
    parameter.register_hook(lambda grad: grad * 3)
    assert not has_hooks_after_accumulation(parameter)
    handle = parameter.register_post_accumulate_grad_hook(lambda _: heard.append(1))
    assert has_hooks_after_accumulation(parameter)
    (hook,) = hooks_of_gradient(parameter)
    assert hook(torch.ones(1)).item() == 3
    hooks = take_hooks_of_gradient(parameter)
    parameter.sum().backward()
    assert parameter.grad.tolist() == [1, 1] and not take_hooks_of_gradient(parameter)
    put_hooks_of_gradient(parameter, hooks)
    parameter.sum().backward()
    assert parameter.grad.tolist() == [4, 4] and heard == [1, 1]
    heard.clear()
    taken = take_hooks_after_accumulation(parameter)
    assert parameter._post_accumulate_grad_hooks is None  # what fully_shard looks at
    parameter.sum().backward()
    assert heard == []
    put_hooks_after_accumulation(parameter, taken)
    parameter.sum().backward()
    assert heard == [1]
    handle.remove()
    assert not has_hooks_after_accumulation(parameter)
    parameter.sum().backward()
    assert heard == [1]


def test_fake_tensors_have_bytes_and_a_device_but_no_memory():
    with fake_tensors():
        tensor = torch.zeros(1 << 20, 1 << 20)
        product = tensor @ tensor
    assert (type(product), product.shape, product.device.type) == (FakeTensor, tensor.shape, "cpu")
    assert product.untyped_storage().nbytes() == 4 << 40


@pytest.mark.parametrize("look", [torch.Tensor.nonzero, torch.Tensor.item])
def test_fake_tensors_have_no_values(look):
    with fake_tensors(), pytest.raises(ASKS_FOR_VALUES):
        look(torch.zeros(()))
