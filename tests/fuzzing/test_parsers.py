"""Parsers of bytes from sockets, disk and network: what is malformed is a typed error of ours, and costs nothing.

Each parser gets valid bytes that were changed, and garbage. It may find them valid, or raise its error; anything else
fails: another exception, a hang (the test's limit), or more memory than the bytes have room for.
"""

from __future__ import annotations

import array
import contextlib
import os
import pickle
import socket
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import Metadata

from memckpt.errors import AgentError, DamagedStateError, MemckptError
from memckpt.journal import events
from memckpt.journal.journal import entries_of
from memckpt.processes.address import AgentAddress
from memckpt.protocol import channel
from memckpt.protocol.channel import Channel
from memckpt.protocol.status import Status
from memckpt.protocol.trainer import Alarm
from memckpt.replication.transport import links, messages
from memckpt.state import codec
from memckpt.state.records import Timeline, decode_meta
from memckpt.state.spec import read_spec
from memckpt.storage.catalog import PINNED, read_keys
from memckpt.storage.dcp import read_metadata
from memckpt.storage.format import Part, decode_commit, decode_node_state, encode_commit
from memckpt.storage.local_store import LocalStore
from memckpt.storage.owner import Claim, Kept, original_of, read_claim, read_kept
from memckpt.storage.store import StoredFile
from tests.support.cluster.peers_records import layout_spec
from tests.support.faults.changed_bytes import FUZZ, NASTY, changed
from tests.support.storage.stored_parts import part_of

#: What parsing may take beside a multiple of the bytes themselves.
MEMORY_BYTES = 4 << 20


def part(path: str) -> Part:
    timeline = Timeline(1, "abc")
    return part_of(3, timeline=timeline, node="n", created=time.time(), files=(StoredFile(path, 1, "x"),))


def _file(read: Callable[[LocalStore], Any], name: str) -> Callable[[bytes, Path], Any]:
    def parse(data: bytes, directory: Path) -> Any:
        (directory / name).write_bytes(data)
        return read(LocalStore(directory))

    return parse


def _address(data: bytes, directory: Path) -> Any:
    address = AgentAddress.of(directory, "n")
    address.file_path.write_bytes(data)
    serving = address.serving()
    return serving and serving.serves_elsewhere(directory)


def _kept(data: bytes, directory: Path) -> Any:
    (directory / "run.json").write_bytes(data)
    return original_of(directory, read_kept(directory))


def _commit(data: bytes, directory: Path) -> Any:
    """With a checksum that is right: whoever damages a file on purpose can make one, too."""
    text = data.partition(b"\n")[0]
    return decode_commit(text + b"\n" + xxhash.xxh3_64_hexdigest(text).encode() + b"\n", part("x").commit_path)


@dataclass(frozen=True)
class Parser:
    parse: Callable[[bytes, Path], Any]
    valid: bytes
    errors: tuple[type[Exception], ...] = (MemckptError,)


TREE = {"a": [1, (2.5, None)], "t": torch.ones(3), 7: {1, 2}, "c": 1j, "b": bytearray(b"x")}
PARSERS = {
    "codec": Parser(lambda data, _: codec.decode(data), codec.encode(TREE)),
    "record": Parser(lambda data, _: decode_meta(data), b""),
    "node state": Parser(lambda data, _: decode_node_state(data), msgspec.msgpack.encode({"spec": {}, "missing": []})),
    "layout spec": Parser(
        lambda data, _: read_spec(data), msgspec.msgpack.encode(layout_spec(elements=9)), (ValueError,)
    ),
    "commit file": Parser(_commit, encode_commit(part("base/x"))),
    "metadata": Parser(lambda data, _: read_metadata(data), pickle.dumps(Metadata({}, {}, {}))),
    "journal": Parser(
        lambda data, _: events.decode(data),
        b'{"time":1.0,"node":"n","attempt":1,"event":"later","what":[1,{"x":2}]}',
        (DamagedStateError,),
    ),
    "agent's address": Parser(
        _address,
        b'{"pid":1,"start_ticks":1,"boot":"b","pid_namespace":1,"socket":"s","descriptor":2,"directory":"/x","inode":3}',
    ),
    "run": Parser(_kept, msgspec.json.encode(Kept("run", directory="/x"))),
    "owner": Parser(_file(read_claim, "owner.json"), msgspec.json.encode(Claim("run"))),
    "pins": Parser(_file(lambda store: read_keys(store, PINNED), "pinned.json"), b'[[1,"abc",3]]'),
    "message between nodes": Parser(lambda data, _: messages.decode(data), b"\x92\x01\x02", (ValueError,)),
    "envelope": Parser(
        lambda data, _: links.decode(data), links.encode(links.Data("a", "b", "c", 1, 2)), (ValueError,)
    ),
}


def check(parser: Parser, data: bytes, directory: Path) -> None:
    tracemalloc.start()
    try:
        with contextlib.suppress(*parser.errors):
            parser.parse(data, directory)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MEMORY_BYTES + 100 * len(data)


@pytest.mark.parametrize("name", PARSERS)
@given(data=st.data())
@FUZZ
def test_malformed_bytes_are_an_error_of_ours(name: str, data: st.DataObject, tmp_path: Path) -> None:
    parser = PARSERS[name]
    check(parser, data.draw(st.one_of(changed(parser.valid), st.binary(max_size=200))), tmp_path)


@pytest.mark.parametrize("name", PARSERS)
def test_what_is_made_to_hurt_is_an_error_of_ours(name: str, tmp_path: Path) -> None:
    for nasty in NASTY:
        for data in (nasty, PARSERS[name].valid[:-1] + nasty):
            check(PARSERS[name], data, tmp_path)


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "base/../../x", "base//x", "a\0b", ""])
def test_a_commit_file_names_no_file_outside_of_its_store(path: str) -> None:
    """Retention deletes what it names."""
    data = encode_commit(part(path))
    with pytest.raises(DamagedStateError, match="expected paths of files in the store"):
        decode_commit(data, part(path).commit_path)


def test_metadata_change_no_class() -> None:
    data = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\nN}X\x08\x00\x00\x00intruderK\x01s\x86b."
    with pytest.raises(DamagedStateError, match="a state of"):
        read_metadata(data)
    assert not hasattr(Metadata, "intruder")


def test_lines_that_are_no_events_are_left_out() -> None:
    whole = PARSERS["journal"].valid
    assert len(entries_of([whole, *NASTY, whole[:-5], whole])) == 2


# The socket of an agent


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Channel[Any, Any]]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, Channel(theirs)


def said(ends: tuple[socket.socket, Channel[Any, Any]], packet: bytes, *fds: int) -> Any:
    """What the channel makes of a packet; a descriptor that it does not hand out is closed."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    ends[0].sendmsg([packet], rights)
    before = len(os.listdir("/proc/self/fd"))
    try:
        received = ends[1].poll(5.0)
    except AgentError:
        assert len(os.listdir("/proc/self/fd")) == before
        raise
    assert received is not None
    for fd in received[1]:
        os.close(fd)
    return received[0]


SHOWN = Status(4711, "/run", "node", "eager", ((0, 42),), ((0, 9),), 7, 10, 3 << 20, 2, 1.0, None)
MESSAGE, STATUS = channel.encode(Alarm("what")), channel.encode(SHOWN)
VALID = [b"i" + MESSAGE, b"i" + STATUS]
PACKETS = st.one_of(*map(changed, VALID), st.binary(min_size=1, max_size=200), st.sampled_from(NASTY).map(b"i".__add__))


@given(packet=PACKETS)
@FUZZ
def test_packets(packet: bytes, ends: tuple[socket.socket, Channel[Any, Any]]) -> None:
    if not 0 < len(packet) <= channel.INLINE_BYTES:
        return
    with contextlib.suppress(AgentError):
        said(ends, packet)


def test_a_body_in_a_file_is_a_file_that_its_sender_has_filled(ends: tuple[socket.socket, Channel[Any, Any]]) -> None:
    file = os.memfd_create("body")
    reading, writing = os.pipe()
    null = os.open("/", os.O_PATH)
    try:
        os.write(file, MESSAGE)
        assert said(ends, b"f", file) == Alarm("what")
        os.ftruncate(file, 1 << 44)
        for fds in ([file], [reading], [writing], [null], [null, reading], []):
            with pytest.raises(AgentError, match="could not be understood"):
                said(ends, b"f", *fds)
    finally:
        for fd in (file, reading, writing, null):
            os.close(fd)
