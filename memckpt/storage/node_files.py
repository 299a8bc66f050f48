"""A node's state as files: from the memory of an agent into a store.

In memory it is a copy of the state: parameters and optimizer state as in a replica, then the by-value tensors of each
local rank. In a store its tensors are called ``model.<name>`` and ``optimizers.<index>.<name of the parameter>.<key>``.

Each node writes its shard of a sharded tensor under the same name, at the shard's offset. Tensors private to a rank
(buffers), or to the ranks that hold the same shards (plain tensors beside sharded ones), have these names for rank 0.
For other ranks the prefix ``ranks.<first of these ranks>.`` is added.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch

from memckpt.errors import DamagedStateError
from memckpt.state import codec
from memckpt.state.layout import Layout
from memckpt.state.redo import tensor_at
from memckpt.state.slices import join_slices
from memckpt.state.spec import ParamSpec, Shard, StateSpec, StateTensorSpec, TensorSpec
from memckpt.storage import dcp
from memckpt.storage.catalog import Checkpoint
from memckpt.storage.format import NodeState, Part, encode_commit, encode_node_state
from memckpt.storage.store import Store


def model_name(name: str) -> str:
    return f"model.{name}"


def state_name(optimizer: int, param: str, key: str) -> str:
    return f"optimizers.{optimizer}.{param}.{key}"


def state_shard(param: TensorSpec, state: StateTensorSpec) -> Shard | None:
    """The shard of a tensor of optimizer state; element-wise state is cut like its parameter. None: it is whole."""
    return param.shard if state.elementwise else None


class StoredNames:
    """Names of the tensors in one node's part."""

    def __init__(self, spec: StateSpec) -> None:
        self._spec = spec
        self._first = spec.serves[0]

    def tensor(self, tensor: TensorSpec) -> str:
        """Name of a parameter, stepped or not."""
        return self._of_first(model_name(tensor.name), tensor.shard)

    def state(self, param: ParamSpec, optimizer: int, state: StateTensorSpec) -> str:
        """Name of a tensor of optimizer state."""
        name = state_name(optimizer, param.tensor.name, state.key)
        # A slice has its parameters whole, and so all of their state.
        whole = self._spec.slice_count > 1
        return self._of_first(name, param.tensor.shard if whole else state_shard(param.tensor, state))

    def _of_first(self, name: str, shard: Shard | None) -> str:
        return name if shard is not None or self._first == 0 else f"ranks.{self._first}.{name}"

    def by_value(self, tensor: TensorSpec, rank: int) -> str:
        """Name of a rank's by-value tensor. The first ranks' shards together make up a sharded one."""
        if rank == 0 or self._is_piece(tensor, rank):
            return model_name(tensor.name)
        return f"ranks.{rank}.{model_name(tensor.name)}"

    def _is_piece(self, tensor: TensorSpec, rank: int) -> bool:
        return tensor.shard is not None and rank == self._first

    def shards(self) -> dict[str, Shard]:
        """The shards among the tensors, by name."""
        return {name: shard for name, shard in self._all_shards() if shard is not None}

    def _all_shards(self) -> Iterator[tuple[str, Shard | None]]:
        for tensor in self._spec.static:
            yield self.tensor(tensor), tensor.shard
        for param in self._spec.params:
            yield self.tensor(param.tensor), param.tensor.shard
            for owner in param.owners:
                for state in owner.state:
                    yield self.state(param, owner.optimizer, state), state_shard(param.tensor, state)
        for tensor in self._spec.by_value:
            if self._is_piece(tensor, self._first):
                yield model_name(tensor.name), tensor.shard


def state_tensors(
    layout: Layout, state: mmap.mmap, static: mmap.mmap | None, missing: Sequence[tuple[int, int, str]]
) -> dict[str, torch.Tensor]:
    """Views of parameters, optimizer state and static tensors, by their names in a store.

    `missing` has parameter index, optimizer and key of optimizer state that does not exist.
    """
    absent = set(missing)
    names = StoredNames(layout.spec)
    tensors: dict[str, torch.Tensor] = {}
    for index, (param, (value, states)) in enumerate(zip(layout.spec.params, layout.replica_offsets, strict=True)):
        tensor = param.tensor
        if tensor.elsewhere:
            continue
        tensors[names.tensor(tensor)] = tensor_at(state, value, tensor.shape, tensor.dtype)
        for owner in param.owners:
            for spec in owner.state:
                if (index, owner.optimizer, spec.key) not in absent:
                    name = names.state(param, owner.optimizer, spec)
                    tensors[name] = tensor_at(state, states[owner.optimizer, spec.key], spec.shape, spec.dtype)
    for tensor, offset in zip(layout.spec.static, layout.static_offsets, strict=True):
        if tensor.elsewhere:
            continue
        assert static is not None
        tensors[names.tensor(tensor)] = tensor_at(static, offset, tensor.shape, tensor.dtype)
    return tensors


def by_value_tensors(layout: Layout, by_value: mmap.mmap, base: int) -> dict[str, torch.Tensor]:
    """Views of all local ranks' by-value tensors by name; `base` is their offset in bytes."""
    spec = layout.spec
    names = StoredNames(spec)
    tensors: dict[str, torch.Tensor] = {}
    for rank in spec.local_ranks:
        for tensor, offset in zip(spec.by_value, layout.by_value_offsets(rank), strict=True):
            tensors[names.by_value(tensor, rank)] = tensor_at(by_value, base + offset, tensor.shape, tensor.dtype)
    return tensors


def join_states(checkpoint: Checkpoint, state_of: Callable[[Part], NodeState]) -> NodeState:
    """The first rank's state beside its tensors; where nodes hold slices, that of all of them.

    `state_of` reads a part, and is asked once for each. Raises DamagedStateError: they do not fit together.
    """
    first_part = checkpoint.part_serving(0)
    first = state_of(first_part)
    if first.spec.slice_count == 1:
        return first
    parts = [first if part == first_part else state_of(part) for part in checkpoint.full_parts]
    try:
        spec = join_slices([part.spec for part in parts])
    except ValueError as error:
        raise DamagedStateError(f"{checkpoint.directory}: {error}") from error
    missing: list[tuple[int, int, str]] = []
    plain: dict[int, Any] = {}
    for part in parts:
        here = {index for index, param in enumerate(part.spec.params) if not param.tensor.elsewhere}
        missing += [one for one in part.missing if one[0] in here]
        plain |= {index: one for index, one in codec.decode(part.plain).items() if index in here} if part.plain else {}
    return NodeState(spec, tuple(missing), codec.encode(plain) if plain else b"", first.rank_states)


def write_files(store: Store, part: Part, state: NodeState, tensors: Mapping[str, torch.Tensor]) -> Part:
    """Write the data files of a node's part, without its commit file. Returns the part with its files."""
    shards = StoredNames(state.spec).shards()
    files = dcp.save(store, part.base_directory, tensors, shards) if tensors else ()
    files += (store.write(part.state_path, encode_node_state(state)),)
    return msgspec.structs.replace(part, files=files)


def write_commit(store: Store, part: Part) -> None:
    """Write the commit file of a part whose data files are written."""
    store.write(part.commit_path, encode_commit(part))
