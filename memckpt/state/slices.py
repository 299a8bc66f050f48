"""Slices of a state that several nodes have alike: each node copies, holds, redoes and stores one of them.

Under data parallelism every node could hold all of the state; together they need to hold it once. REFT (section IV,
"Intra-Pipeline-Stage Sharding") snapshots slices over the paths of data parallelism. Here a slice is whole tensors. The
layout of a node lists all tensors, and those of other slices are *elsewhere*: they take no bytes. A restore broadcasts
each tensor from the node that has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from memckpt.state.spec import ParamSpec, Shard, StateSpec, TensorSpec


def assign_slices(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """The slice, of `count`, that each tensor is in, balanced by bytes; `sizes` are by name."""
    loads = [0] * count
    found = {}
    for name in sorted(sizes, key=lambda one: (-sizes[one], one)):
        found[name] = loads.index(min(loads))
        loads[found[name]] += sizes[name]
    return found


def cut_to_slice(spec: StateSpec, number: int, count: int, slice_of: Callable[[str], int | None]) -> StateSpec:
    """The spec of the node that has slice `number` of `count`; `slice_of` a tensor of this name: None, all have it.

    By-value tensors and single numbers stay on all nodes. So does everything in mode ``"snapshot"``, in which a rank
    encodes what has no room in slots.
    """
    spec = replace(spec, slice_number=number, slice_count=count)
    if count == 1 or spec.mode == "snapshot":
        return spec

    def tensor(one: TensorSpec) -> TensorSpec:
        where = slice_of(one.name) if one.shape else None
        if where is None:
            return one
        shard = Shard((0,) * len(one.shape), one.shape)
        if where == number:
            return replace(one, shard=shard)
        return replace(one, shape=(0, *one.shape[1:]), shard=shard, elsewhere=True)

    def param(one: ParamSpec) -> ParamSpec:
        cut = tensor(one.tensor)
        if not cut.elsewhere:
            return replace(one, tensor=cut)
        owners = tuple(
            replace(owner, state=tuple(replace(each, shape=(0, *each.shape[1:])) for each in owner.state))
            for owner in one.owners
        )
        return replace(one, tensor=cut, owners=owners, sparse_bytes=0, stride=())

    return replace(spec, params=tuple(map(param, spec.params)), static=tuple(map(tensor, spec.static)))


def join_slices(specs: Sequence[StateSpec]) -> StateSpec:
    """The spec of the whole state, of those of all its slices. Raises ValueError: they do not fit together."""
    first = specs[0]
    params = []
    for alike in zip(*(spec.params for spec in specs), strict=True):
        if len({one.tensor.name for one in alike}) > 1 or (found := _first_here(alike)) is None:
            raise ValueError(f"expected slices with {alike[0].tensor.name} in one of them, found none")
        params.append(found)
    static = {one.name: one for spec in specs for one in spec.static if not one.elsewhere}
    lacking = {one.name for spec in specs for one in spec.static} - static.keys()
    if lacking := lacking - {one.name for one in first.by_value}:
        raise ValueError(f"expected slices with {sorted(lacking)[0]} in one of them, found none")
    return replace(first, params=tuple(params), static=tuple(static.values()))


def _first_here(alike: Sequence[ParamSpec]) -> ParamSpec | None:
    return next((one for one in alike if not one.tensor.elsewhere), None)
