"""What a checkpoint in storage consists of, and its commit file. Torch-free; reading it executes nothing.

    base/<timeline>/<record>/<node>/      the tensors that a node holds, in the format of torch.distributed.checkpoint
    state/<timeline>/<record>/<node>.msgpack   what belongs to them: layout, rank states
    commit/<timeline>/<record>/<node>.json     written last: names every file, with size and checksum

A node's part exists when its commit file does and verifies; a checkpoint when the parts of all ranks exist.
"""

from __future__ import annotations

import msgspec
import xxhash

from memckpt.errors import DamagedStateError, UnsupportedError
from memckpt.state.layout import StateSpec
from memckpt.state.records import Timeline
from memckpt.storage.store import StoredFile

#: Raised whenever something is written that an older version would misread.
FORMAT_VERSION = 1
BASES, STATES, COMMITS = "base", "state", "commit"

_STATE, _COMMIT = ".msgpack", ".json"


class Part(msgspec.Struct, frozen=True):
    """One node's part of a checkpoint: the content of a commit file.

    Attributes:
        format: version of all that is written.
        timeline, record, step: which state it is.
        world_size: ranks of the job; `ranks` are those of the node.
        full: whether parameters and optimizer state are in it; with replicated training one node's part has them.
        created: seconds since 1970.
        files: all that it consists of.
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

    @property
    def place(self) -> str:
        """The middle of its paths."""
        return f"{self.timeline.number:06d}-{self.timeline.nonce}/{self.record:012d}"

    @property
    def base_directory(self) -> str:
        return f"{BASES}/{self.place}/{self.node}"

    @property
    def state_path(self) -> str:
        return f"{STATES}/{self.place}/{self.node}{_STATE}"

    @property
    def commit_path(self) -> str:
        return f"{COMMITS}/{self.place}/{self.node}{_COMMIT}"


def place_of(path: str) -> tuple[tuple[int, str, int], str] | None:
    """To which record (attempt's number and nonce, record) and node a file belongs; None for one that is not ours."""
    top, *middle = path.split("/")
    if len(middle) != {BASES: 4, STATES: 3, COMMITS: 3}.get(top):
        return None
    attempt, record, node = middle[:3]
    number, _, nonce = attempt.partition("-")
    if not (number.isdecimal() and record.isdecimal()):
        return None
    return (int(number), nonce, int(record)), node.removesuffix({STATES: _STATE, COMMITS: _COMMIT}.get(top, ""))


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


def encode_commit(part: Part) -> bytes:
    """JSON in one line, its checksum in the next."""
    text = msgspec.json.encode(part)
    return text + b"\n" + xxhash.xxh3_64_hexdigest(text).encode() + b"\n"


def decode_commit(data: bytes, path: str) -> Part:
    """Read a commit file.

    Raises:
        DamagedStateError: it is not what was written.
        UnsupportedError: a newer version has written it.
    """
    text, _, checksum = data.partition(b"\n")
    if xxhash.xxh3_64_hexdigest(text).encode() + b"\n" != checksum:
        raise DamagedStateError(f"{path}: the checksum does not match; the file is cut short or changed")
    try:
        version = msgspec.json.decode(text, type=_Version).format
        if version > FORMAT_VERSION:
            raise UnsupportedError(
                f"{path}: expected format {FORMAT_VERSION} or older, found {version}: a newer memckpt has written "
                "this run; install that version"
            )
        part = msgspec.json.decode(text, type=Part)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise DamagedStateError(f"{path}: expected a commit file, found something else: {error}") from error
    if part.commit_path != path:
        raise DamagedStateError(f"{path}: it belongs at {part.commit_path}")
    return part
