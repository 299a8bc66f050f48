"""What a checkpoint in storage consists of, and its commit file. Torch-free; reading it executes nothing.

    base/<timeline>/<record>/<node>/      the tensors that a node holds, in the format of torch.distributed.checkpoint
    base/<timeline>/<record>/.metadata    makes one checkpoint of all nodes' tensors, for stock tools; not needed here
    state/<timeline>/<record>/<node>.msgpack   what belongs to them: layout, rank states
    log/<timeline>/<first>-<last>/<node>.safetensors   a batch: the records `first` to `last`, as far as a node has them
    commit/<timeline>/<record>/<node>.json     written last: names every file, with size and checksum
    commit/<timeline>/<first>-<last>/<node>.json   the same for a batch

A node's part exists when its commit file does and verifies; a checkpoint when the parts of all ranks exist. Where
ranks of one machine hold different shards, what is called a node here is a unit: those of its ranks that hold the same.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import xxhash

from memckpt.errors import DamagedStateError, UnsupportedError
from memckpt.state.layout import StateSpec
from memckpt.state.records import Timeline
from memckpt.storage.store import StoredFile

#: Raised whenever something is written that an older version would misread. One before 4 knows of no owner.
FORMAT_VERSION = 4
BASES, STATES, LOGS, COMMITS = "base", "state", "log", "commit"

#: What torch.distributed.checkpoint calls the file that says where which tensor is.
MERGED = ".metadata"

_STATE, _LOG, _COMMIT = ".msgpack", ".safetensors", ".json"


class Part(msgspec.Struct, frozen=True):
    """One node's part of a checkpoint: the content of a commit file.

    Attributes:
        format: version of all that is written.
        timeline, record, step: which state it is.
        world_size: ranks of the job; `ranks` are those of the node.
        full: whether parameters and optimizer state are in it; of the parts that serve the same ranks one has them.
        created: seconds since 1970.
        files: all that it consists of.
        content: digest of what is in it (:meth:`StateSpec.content`); records can be redone on an equal one.
        serves: the ranks whose parameters and optimizer state these are; empty: those of all ranks.
        run: id of the run that has written it; empty: by a version that had none.
    """

    format: int
    timeline: Timeline
    record: int
    step: int
    world_size: int
    ranks: tuple[int, ...]
    node: str
    full: bool
    created: float
    files: tuple[StoredFile, ...] = ()
    content: str = ""
    serves: tuple[int, ...] = ()
    run: str = ""

    @property
    def served(self) -> tuple[int, ...]:
        """`serves`, spelled out."""
        return self.serves or tuple(range(self.world_size))

    @property
    def place(self) -> str:
        """The middle of its paths."""
        return f"{_directory_of(self.timeline)}/{self.record:012d}"

    @property
    def checkpoint_directory(self) -> str:
        """Where the tensors of all parts are."""
        return f"{BASES}/{self.place}"

    @property
    def base_directory(self) -> str:
        return f"{BASES}/{self.place}/{self.node}"

    @property
    def state_path(self) -> str:
        return f"{STATES}/{self.place}/{self.node}{_STATE}"

    @property
    def commit_path(self) -> str:
        return f"{COMMITS}/{self.place}/{self.node}{_COMMIT}"


class Batch(msgspec.Struct, frozen=True):
    """What one node has of some records that follow each other: the content of a batch's commit file.

    Attributes:
        format, world_size, ranks, node, full, created, files, content, serves, run: as for a part; `full`: gradients
            are in it.
        timeline, first, last: which records.
        steps: the user-facing step of each.
        follows: the timeline of the record before the first, on whose state the first one is redone; None: that state
            is no record's.
    """

    format: int
    timeline: Timeline
    first: int
    last: int
    steps: tuple[int, ...]
    follows: Timeline | None
    world_size: int
    ranks: tuple[int, ...]
    node: str
    full: bool
    created: float
    content: str
    files: tuple[StoredFile, ...] = ()
    serves: tuple[int, ...] = ()
    run: str = ""

    @property
    def served(self) -> tuple[int, ...]:
        """`serves`, spelled out."""
        return self.serves or tuple(range(self.world_size))

    @property
    def place(self) -> str:
        """The middle of its paths."""
        return f"{_directory_of(self.timeline)}/{self.first:012d}-{self.last:012d}"

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    @property
    def log_path(self) -> str:
        return f"{LOGS}/{self.place}/{self.node}{_LOG}"

    @property
    def commit_path(self) -> str:
        return f"{COMMITS}/{self.place}/{self.node}{_COMMIT}"


def _directory_of(timeline: Timeline) -> str:
    return f"{timeline.number:06d}-{timeline.nonce}"


class Place(NamedTuple):
    """To what a file belongs: the part of `node` after `record`, or its batch of the records `first` to `record`.

    The file that makes one checkpoint of all parts belongs to no node: there it is empty.
    """

    number: int
    nonce: str
    record: int
    first: int | None
    node: str

    @property
    def key(self) -> tuple[int, str, int]:
        """What orders checkpoints and batches: later attempts first of all."""
        return self.number, self.nonce, self.record

    @property
    def timeline(self) -> Timeline:
        return Timeline(self.number, self.nonce)


def place_of(path: str) -> Place | None:
    """To what a file belongs; None for one that is not ours."""
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
    """What orders the newest that a directory of commit files may hold; infinity: any record. None: it is none."""
    top, *middle = path.split("/")
    if top != COMMITS or not 1 <= len(middle) <= 2:
        return None
    number, _, nonce = middle[0].partition("-")
    last = middle[1].rpartition("-")[2] if len(middle) == 2 else ""
    if not number.isdecimal() or (last and not last.isdecimal()):
        return None
    return int(number), nonce, int(last) if last else float("inf")


class NodeState(msgspec.Struct, frozen=True):
    """What belongs to a node's tensors.

    Attributes:
        spec: the layout they were written from.
        missing, plain: what of the optimizer state did not exist, and what of it is not a tensor (codec).
        rank_states: by rank (codec).
    """

    spec: StateSpec
    missing: tuple[tuple[int, int, str], ...]
    plain: bytes
    rank_states: dict[int, bytes]


class _Version(msgspec.Struct):
    format: int


_node_state_encoder = msgspec.msgpack.Encoder()
_node_state_decoder = msgspec.msgpack.Decoder(NodeState)


def encode_node_state(state: NodeState) -> bytes:
    return _node_state_encoder.encode(state)


def decode_node_state(data: bytes) -> NodeState:
    """Raises DamagedStateError."""
    try:
        return _node_state_decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise DamagedStateError(f"expected a node's state, found something else: {error}") from error


def encode_commit(content: Part | Batch) -> bytes:
    """JSON in one line, its checksum in the next."""
    text = msgspec.json.encode(content)
    return text + b"\n" + xxhash.xxh3_64_hexdigest(text).encode() + b"\n"


def decode_commit(data: bytes, path: str) -> Part | Batch:
    """Read a commit file.

    Raises:
        DamagedStateError: it is not what was written.
        UnsupportedError: a newer version has written it.
    """
    text, _, checksum = data.partition(b"\n")
    if xxhash.xxh3_64_hexdigest(text).encode() + b"\n" != checksum:
        raise DamagedStateError(f"{path}: the checksum does not match; the file is cut short or changed")
    place = place_of(path)
    try:
        version = msgspec.json.decode(text, type=_Version).format
        if version > FORMAT_VERSION:
            raise UnsupportedError(
                f"{path}: expected format {FORMAT_VERSION} or older, found {version}: a newer memckpt has written "
                "this run; install that version"
            )
        content: Part | Batch
        if place is not None and place.first is not None:
            content = msgspec.json.decode(text, type=Batch)
        else:
            content = msgspec.json.decode(text, type=Part)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise DamagedStateError(f"{path}: expected a commit file, found something else: {error}") from error
    if content.commit_path != path:
        raise DamagedStateError(f"{path}: it belongs at {content.commit_path}")
    return content
