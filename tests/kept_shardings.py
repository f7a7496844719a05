"""Cuts of the results of DTensor's operations, worked out once per session of tests."""

import io
import pickle

from torch._guards import detect_fake_mode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.placement_types import _StridedShard

from kept import Kept

_PLAIN = {Partial, Replicate, Shard, _StridedShard}
"""Placements that are what their repr says."""


def keep_shardings(directory):
    """Has DTensor work out once per session how the results of an operation are cut, not in each rank anew.

    At an operation's first use in a process that takes 8 ms, with an optimizer a fifth of what a rank of a test does.
    All ranks must come to the same; what has sizes of this rank's part in it is worked out as before.
    """
    known, compute = Kept(directory), ShardingPropagator.propagate_op_sharding_non_cached

    def sharding_of(propagator, schema):
        if detect_fake_mode() is not None:  # it is traced, with symbols in shapes
            return compute(propagator, schema)
        given = [schema.op]
        arguments = _described(schema.args_schema, given), _described(list(schema.kwargs_schema.items()), given)
        key = f"{schema.op} {arguments} {[(mesh.device_type, mesh.shape) for mesh in given[1:]]}"
        if key not in known:
            sharding, written = compute(propagator, schema), io.BytesIO()
            if sharding.use_val_from_redistribute_schema:
                return sharding
            try:
                _Pickler(written, given).dump(sharding)
            except pickle.PicklingError:
                return sharding
            known[key] = written.getvalue()
        return _Unpickler(io.BytesIO(known[key]), given).load()

    ShardingPropagator.propagate_op_sharding_non_cached = sharding_of


def _described(value, given):
    """Says what decides how results are cut; appends to `given` the meshes that it comes across."""
    if isinstance(value, DTensorSpec):
        if value.mesh not in given:
            given.append(value.mesh)
        return f"{value.tensor_meta} {value.placements} {value.shard_order} on {given.index(value.mesh)}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}{[_described(each, given) for each in value]}"
    return repr(value)


class _Pickler(pickle.Pickler):
    """Writes what belongs to one process, an operation and its meshes, as their numbers in `given`."""

    def __init__(self, file, given):
        super().__init__(file)
        self._given = given

    def persistent_id(self, value):
        if value is not self._given[0] and not isinstance(value, DeviceMesh):
            return None
        if value not in self._given:
            raise pickle.PicklingError(f"{value} is none of the arguments'")
        return self._given.index(value)

    def reducer_override(self, value):
        if type(value) is DTensorSpec:  # without its hash, which is one process's
            if any(type(placement) not in _PLAIN for placement in value.placements):
                raise pickle.PicklingError(f"{value} may hold more than it shows")
            strided = value.use_strided_shard_as_shard_order
            order = None if strided else value.shard_order
            return DTensorSpec, (value.mesh, value.placements, value.tensor_meta, order, strided)
        if type(value) is OpSchema:
            return OpSchema, (value.op, value.args_schema, value.kwargs_schema, value.schema_info)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file, given):
        super().__init__(file)
        self._given = given

    def persistent_load(self, number):
        return self._given[number]
