"""What replicators say to each other: typed, validated, no pickle. Bytes of fragments travel beside a message."""

from __future__ import annotations

import msgspec

from memckpt.replication.coding.code import Fragment
from memckpt.state.records import Branch, RankGroup


class Window(msgspec.Struct, frozen=True, array_like=True):
    """One generation of an owner's records, of which a holder keeps a fragment of each stripe.

    `attempt`: its writer's nonce. `index`: the holder's fragment; `data`, `tolerate`: k and m. It begins after `base`.
    `private`: as in HeldFragments. `spec`: a StateSpec, encoded. `by_value`: the state after `base` alone.
    """

    owner: RankGroup
    node: str
    generation: str
    attempt: str
    index: int
    data: int
    tolerate: int
    base: int
    private: bool
    history: tuple[Branch, ...]
    spec: bytes
    by_value: bool = False


class Open(msgspec.Struct, frozen=True, tag="open"):
    """Sender to holder: records of this window follow."""

    window: Window


class Put(msgspec.Struct, frozen=True, tag="put"):
    """Sender to holder: fragments of one record, whose bytes come beside; `step` is the framework's of the record."""

    fragments: tuple[Fragment, ...]
    step: int


class Abandon(msgspec.Struct, frozen=True, tag="abandon"):
    """Sender to holder: of this record no more can come."""

    owner: RankGroup
    generation: str
    record: int


class Stored(msgspec.Struct, frozen=True, tag="stored"):
    """Holder to owner: all of its fragments of a record are here."""

    owner: RankGroup
    generation: str
    record: int


class Kept(msgspec.Struct, frozen=True, tag="kept"):
    """Holder to owner, in answer to an Open of what is known: all of these records has been here since before."""

    owner: RankGroup
    generation: str
    records: tuple[int, ...]


class NotStored(msgspec.Struct, frozen=True, tag="not stored"):
    """Holder to owner: this record is not kept; `nothing`: none of its generation is, whatever was said before."""

    owner: RankGroup
    generation: str
    record: int
    reason: str
    nothing: bool = False


class Acknowledged(msgspec.Struct, frozen=True, tag="acked"):
    """Node to leader: the newest record that all holders have of everything it owns.

    `since`: they have all from this record on; before it there may be some that are nowhere any more, where an agent or
    a holder came back empty. `whole`: whether they have all that its state needs; where a holder came back empty, that
    takes T records. `lost`: nobody is to wait for the node. It has lost all that it had and begins anew at one of the
    next records, or its agent or one of its holders stands still.

    `state`: the newest record whose state by value they have, and the node itself; `ordered`: the one whose state they
    are to get next, or have; `missed`: one whose state it was to copy, and could not. `needed`: the smallest N that its
    links would carry, 0: not measured yet; `every`: N, as the node knows it.
    """

    node: str
    record: int
    since: int
    whole: bool
    lost: bool = False
    state: int = 0
    ordered: int = 0
    missed: int = 0
    needed: int = 0
    every: int = 1


class Watermark(msgspec.Struct, frozen=True, tag="watermark"):
    """Leader to nodes: the newest record that is acknowledged for every node; `whole` as above, for all of them.

    `waits_suspended`: nobody is to wait. Some node has lost all that it had, and to begin anew it has to get to another
    record, which takes all ranks; or some node stands still for too long. `every`, `due`, `needed`: as in Cadence.
    `unheard`: nodes that the leader does not hear.
    """

    record: int
    whole: bool
    waits_suspended: bool = False
    every: int = 1
    due: int = 0
    needed: int = 0
    unheard: tuple[str, ...] = ()


class Whereabouts(msgspec.Struct, frozen=True, tag="where"):
    """A node's replicator was replaced, and listens at another address than the plan says. Told to all partners."""

    node: str
    address: str


class AskManifest(msgspec.Struct, frozen=True, tag="manifest?"):
    """Reader to holder or owner: what does a record consist of? Answer: Manifest or GotNone."""

    request: int
    owner: RankGroup
    generation: str
    record: int


class Manifest(msgspec.Struct, frozen=True, tag="manifest"):
    """Answer to AskManifest; most holders' word counts. `digests`: xxh3_128 of stripes; empty from an owner."""

    request: int
    record: int
    nbytes: int
    digests: bytes


class Get(msgspec.Struct, frozen=True, tag="get"):
    """Reader to holder or owner: the fragment of a stripe; `index` None: an owner's own bytes, the whole stripe."""

    request: int
    owner: RankGroup
    generation: str
    record: int
    index: int | None
    stripe: int


class Got(msgspec.Struct, frozen=True, tag="got"):
    """Answer to Get; the bytes come beside. Without a fragment: a whole stripe, and its digest."""

    request: int
    record: int
    stripe: int
    fragment: Fragment | None = None
    digest: bytes = b""


class AskWindow(msgspec.Struct, frozen=True, tag="window?"):
    """Reader to holder or owner: of which layout is what you have? Answer: WindowIs or GotNone."""

    request: int
    owner: RankGroup
    generation: str


class WindowIs(msgspec.Struct, frozen=True, tag="window"):
    """Answer to AskWindow: its StateSpec, encoded."""

    request: int
    owner: RankGroup
    spec: bytes


class GotNone(msgspec.Struct, frozen=True, tag="got none"):
    """Answer to a question: it is not here."""

    request: int
    reason: str


WireMessage = (
    Open | Put | Abandon | Stored | Kept | NotStored | Acknowledged | Watermark | Whereabouts |
    AskManifest | Manifest | Get | Got | AskWindow | WindowIs | GotNone
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[WireMessage] = msgspec.msgpack.Decoder(WireMessage)


def encode(message: WireMessage) -> bytes:
    return _encoder.encode(message)


def decode(body: bytes) -> WireMessage:
    """Raises ValueError for what is no message."""
    try:
        return _decoder.decode(body)
    except RecursionError as error:
        raise ValueError("expected a message, found lists in lists in lists") from error
