"""Files of a checkpoint in storage, and the commit file. Torch-free; reading executes no stored code.

    base/<timeline>/<record>/<node>/      the tensors that a node holds, in the format of torch.distributed.checkpoint
    base/<timeline>/<record>/.metadata    joins all nodes' tensors into one checkpoint, for stock tools; not read here
    state/<timeline>/<record>/<node>.msgpack   layout and rank states
    log/<timeline>/<first>-<last>/<node>.safetensors   a batch: a node's share of the records `first` to `last`
    commit/<timeline>/<record>/<node>.json     written last: names every file, with size and checksum
    commit/<timeline>/<first>-<last>/<node>.json   the same for a batch

A node's part exists when its commit file exists and verifies; a checkpoint when the parts of all ranks exist. Where
ranks of one machine hold different shards, "node" here means a unit: the ranks that hold the same shards.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import msgspec
import xxhash

from memckpt.errors import MALFORMED, DamagedStateError, UnsupportedError
from memckpt.state.records import Timeline
from memckpt.state.spec import StateSpec, problem_of
from memckpt.storage.store import StoredFile

#: Incremented whenever another version would misread the files.
FORMAT_VERSION = 1
BASES, STATES, LOGS, COMMITS = "base", "state", "log", "commit"

#: torch.distributed.checkpoint's name of its metadata file.
MERGED = ".metadata"

_STATE, _LOG, _COMMIT = ".msgpack", ".safetensors", ".json"


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """What one node has stored of a record, or of several: the content of a commit file."""

    format: int = FORMAT_VERSION
    timeline: Timeline
    world_size: int  #: of the job
    ranks: tuple[int, ...]  #: of the node
    node: str
    full: bool  #: it has parameters and optimizer state, or gradients; one of those that serve the same ranks does
    created: float  #: seconds since 1970
    files: tuple[StoredFile, ...] = ()  #: data files
    content: str = ""  #: :meth:`StateSpec.content`; records can be redone on a part with an equal one
    serves: tuple[int, ...] = ()  #: ranks whose parameters and optimizer state it has; empty: all ranks
    run: str = ""  #: id of the run that wrote it; empty: a run without storage, which was saved by hand
    inexact: str = ""  #: what an audit had found by then in the redo that has made it, in words; empty if nothing

    @property
    def served(self) -> tuple[int, ...]:
        """`serves`, spelled out."""
        return self.serves or tuple(range(self.world_size))

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    @property
    def records(self) -> str:
        """The records, as paths name them."""
        raise NotImplementedError  # each kind has its own, and a struct of msgspec cannot be an abstract class

    @property
    def place(self) -> str:
        """The middle of its paths."""
        return f"{self.timeline.number:06d}-{self.timeline.nonce}/{self.records}"

    @property
    def commit_path(self) -> str:
        return f"{COMMITS}/{self.place}/{self.node}{_COMMIT}"


class Part(Committed, frozen=True, kw_only=True):
    """One node's part of a checkpoint: the state after `record`, which users call `step`."""

    record: int
    step: int

    @property
    def records(self) -> str:
        return f"{self.record:012d}"

    @property
    def base_directory(self) -> str:
        return f"{BASES}/{self.place}/{self.node}"

    @property
    def state_path(self) -> str:
        return f"{STATES}/{self.place}/{self.node}{_STATE}"


class Batch(Committed, frozen=True, kw_only=True):
    """One node's share of the records `first` to `last`."""

    first: int
    last: int
    steps: tuple[int, ...]  #: the user-facing step of each record
    follows: Timeline | None  #: timeline of the record on whose state the first one is redone; None: it is no record's

    @property
    def records(self) -> str:
        return f"{self.first:012d}-{self.last:012d}"

    @property
    def log_path(self) -> str:
        return f"{LOGS}/{self.place}/{self.node}{_LOG}"


def is_inside(path: str) -> bool:
    """Whether a path that was read from a file stays in the store: files that it names are read, and deleted."""
    return "\0" not in path and not {"", ".", ".."} & set(path.split("/"))


class Place(NamedTuple):
    """The part or batch that a file belongs to."""

    number: int
    nonce: str
    record: int  #: that of a part, or the last one of a batch
    first: int | None  #: the first record of a batch; None: a part
    node: str  #: empty for merged metadata, which belongs to no node

    @property
    def key(self) -> tuple[int, str, int]:
        """Sort key: the attempt, then the record."""
        return self.number, self.nonce, self.record

    @property
    def timeline(self) -> Timeline:
        return Timeline(self.number, self.nonce)


def place_of(path: str) -> Place | None:
    """The part or batch that a path belongs to; None: the path is of no known form."""
    top, *middle = path.split("/")
    if top == BASES and len(middle) == 3 and middle[2] == MERGED:
        middle = [*middle[:2], "", MERGED]
    if len(middle) != {BASES: 4, STATES: 3, LOGS: 3, COMMITS: 3}.get(top):
        return None
    attempt, records, node = middle[:3]
    number, _, nonce = attempt.partition("-")
    first, dash, last = records.rpartition("-")
    if not (number.isdecimal() and last.isdecimal() and (first.isdecimal() or not dash)):
        return None
    node = node.removesuffix({STATES: _STATE, LOGS: _LOG, COMMITS: _COMMIT}.get(top, ""))
    return Place(int(number), nonce, int(last), int(first) if dash else None, node)


def directory_key(path: str) -> tuple[int, str, float] | None:
    """Sort key of the newest checkpoint or batch that a directory of commit files may hold; infinity: any record.

    None: the path is no directory of commit files.
    """
    top, *middle = path.split("/")
    if top != COMMITS or not 1 <= len(middle) <= 2:
        return None
    number, _, nonce = middle[0].partition("-")
    last = middle[1].rpartition("-")[2] if len(middle) == 2 else ""
    if not number.isdecimal() or (last and not last.isdecimal()):
        return None
    return int(number), nonce, int(last) if last else float("inf")


class NodeState(msgspec.Struct, frozen=True):
    """A node's state beside its tensors."""

    spec: StateSpec
    missing: tuple[tuple[int, int, str], ...]  #: parameter, optimizer and key of optimizer state that did not exist
    plain: bytes  #: optimizer state that is no tensor, encoded
    rank_states: dict[int, bytes]  #: encoded, by rank


def encode_node_state(state: NodeState) -> bytes:
    return msgspec.msgpack.encode(state)


def decode_node_state(data: bytes) -> NodeState:
    """Decode a node's state, and check that a layout can be made from its spec. Raises DamagedStateError."""
    try:
        state = msgspec.msgpack.decode(data, type=NodeState)
    except MALFORMED as error:
        raise DamagedStateError(f"expected a node's state, found something else: {error}") from error
    if problem := problem_of(state.spec):
        raise DamagedStateError(f"expected a node's state with a valid layout spec, found {problem}")
    return state


def encode_commit(content: Part | Batch) -> bytes:
    """Encode a commit file: JSON in one line, its checksum in the next."""
    text = msgspec.json.encode(content)
    return text + b"\n" + xxhash.xxh3_64_hexdigest(text).encode() + b"\n"


def decode_commit(data: bytes, path: str) -> Part | Batch:
    """Read a commit file.

    Raises DamagedStateError if it is damaged or at another path than it names, UnsupportedError for another version's.
    """
    text, _, checksum = data.partition(b"\n")
    if xxhash.xxh3_64_hexdigest(text).encode() + b"\n" != checksum:
        raise DamagedStateError(f"{path}: the checksum does not match; the file is truncated or changed")
    version = _decode(text, _Version, path).format
    if version != FORMAT_VERSION:
        raise UnsupportedError(
            f"{path}: expected format {FORMAT_VERSION}, found {version}: another version of memckpt has written this "
            "run; install that version"
        )
    place = place_of(path)
    of_batch = place is not None and place.first is not None
    content: Part | Batch = _decode(text, Batch, path) if of_batch else _decode(text, Part, path)
    if content.commit_path != path:
        raise DamagedStateError(f"{path}: it belongs at {content.commit_path}")
    for file in content.files:
        if not is_inside(file.path):
            raise DamagedStateError(f"{path}: expected paths of files in the store, found {file.path!r}")
    return content


class _Version(msgspec.Struct):
    format: int


_Kind = TypeVar("_Kind", bound=msgspec.Struct)


def _decode(text: bytes, kind: type[_Kind], path: str) -> _Kind:
    try:
        return msgspec.json.decode(text, type=kind)
    except MALFORMED as error:
        raise DamagedStateError(f"{path}: expected a commit file, found something else: {error}") from error
