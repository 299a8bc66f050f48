"""Memory in which replicators keep other nodes' fragments. The agent has it, too, so that it outlives them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from memckpt.errors import AgentError
from memckpt.protocol.replication import KeepRoom, LetGoOfRoom
from memckpt.state.records import RankGroup

_Key = tuple[RankGroup, str, int]


class _Kept(NamedTuple):
    message: KeepRoom
    fd: int
    nbytes: int


class FragmentRooms:
    """Descriptors of that memory; owns them. What lies there is the replicator's business."""

    def __init__(self) -> None:
        self._rooms: dict[_Key, _Kept] = {}

    @property
    def nbytes(self) -> int:
        """Shared memory of all rooms, in bytes."""
        return sum(one.nbytes for one in self._rooms.values())

    def keep(self, message: KeepRoom, fds: Sequence[int]) -> None:
        """The replicator has reserved memory; the descriptors are ours from now on.

        Raises:
            AgentError: not one descriptor came along.
        """
        if len(fds) != 1:
            for fd in fds:
                os.close(fd)
            raise AgentError(f"expected one descriptor of memory for fragments, found {len(fds)}")
        key = message.owner, message.generation, message.slot
        self._drop(key)
        self._rooms[key] = _Kept(message, fds[0], os.fstat(fds[0]).st_size)

    def let_go(self, message: LetGoOfRoom) -> None:
        """Close a room that the replicator does not need any more."""
        self._drop((message.owner, message.generation, message.slot))

    def _drop(self, key: _Key) -> None:
        kept = self._rooms.pop(key, None)
        if kept is not None:
            os.close(kept.fd)

    def handover(self) -> Iterator[tuple[KeepRoom, int]]:
        """What another replicator is to be told, each with a descriptor that stays ours."""
        for kept in self._rooms.values():
            yield kept.message, kept.fd

    def close(self) -> None:
        """Close all rooms."""
        for key in list(self._rooms):
            self._drop(key)
