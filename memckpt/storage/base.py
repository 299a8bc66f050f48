"""A node's state as files: from the memory of an agent into a store, and back into live tensors.

In memory the state is a *snapshot*: parameters and optimizer state as in a replica, then the by-value tensors of each
local rank. In a store its tensors are called ``model.<name>``, ``optimizers.<index>.<name of the parameter>.<key>``
and, for local ranks beyond the first, ``ranks.<rank>.<name>``.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import msgspec
import torch

from memckpt.state.layout import Layout
from memckpt.state.redo import tensor_at
from memckpt.storage import dcp
from memckpt.storage.format import NodeState, Part, encode_commit, encode_node_state
from memckpt.storage.store import Store


def model_name(name: str) -> str:
    return f"model.{name}"


def state_name(optimizer: int, param: str, key: str) -> str:
    return f"optimizers.{optimizer}.{param}.{key}"


def by_value_name(name: str, rank: int, ranks: Sequence[int], full: bool) -> str:
    """The first rank's buffers are the model's, where the model is there."""
    return model_name(name) if full and rank == ranks[0] else f"ranks.{rank}.{name}"


def state_tensors(
    layout: Layout, state: mmap.mmap, static: mmap.mmap | None, missing: Sequence[tuple[int, int, str]]
) -> dict[str, torch.Tensor]:
    """Views of parameters, optimizer state and static tensors by the names they have in a store.

    Args:
        layout: where in `state` and `static` they lie, as in a replica.
        missing: what of the optimizer state does not exist.
    """
    absent = set(missing)
    tensors: dict[str, torch.Tensor] = {}
    for index, (param, (value, states)) in enumerate(zip(layout.spec.params, layout.replica_offsets, strict=True)):
        tensor = param.tensor
        tensors[model_name(tensor.name)] = tensor_at(state, value, tensor.shape, tensor.dtype)
        for owner in param.owners:
            for spec in owner.state:
                if (index, owner.optimizer, spec.key) not in absent:
                    name = state_name(owner.optimizer, tensor.name, spec.key)
                    tensors[name] = tensor_at(state, states[owner.optimizer, spec.key], spec.shape, spec.dtype)
    for tensor, offset in zip(layout.spec.static, layout.static_offsets, strict=True):
        assert static is not None
        tensors[model_name(tensor.name)] = tensor_at(static, offset, tensor.shape, tensor.dtype)
    return tensors


def by_value_tensors(layout: Layout, by_value: mmap.mmap, base: int, full: bool) -> dict[str, torch.Tensor]:
    """Views of the by-value tensors of all local ranks, which lie one rank after the other from `base` on."""
    spec = layout.spec
    tensors: dict[str, torch.Tensor] = {}
    for position, rank in enumerate(spec.local_ranks):
        start = base + position * layout.by_value_bytes
        for tensor, offset in zip(spec.by_value, layout.by_value_offsets, strict=True):
            name = by_value_name(tensor.name, rank, spec.local_ranks, full)
            tensors[name] = tensor_at(by_value, start + offset, tensor.shape, tensor.dtype)
    return tensors


def write_base(store: Store, part: Part, state: NodeState, tensors: dict[str, torch.Tensor]) -> Part:
    """Write a node's part: data first, the commit file last. Returns the part as committed."""
    files = dcp.save(store, part.base_directory, tensors, crc32=False) if tensors else ()
    files += (store.write(part.state_path, encode_node_state(state)),)
    committed = msgspec.structs.replace(part, files=files)
    store.write(committed.commit_path, encode_commit(committed))
    return committed
