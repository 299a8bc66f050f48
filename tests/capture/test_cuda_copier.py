"""The copier of accelerators, on streams that only keep account of what happens before what: no copy races."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from memckpt.capture.copier import AcceleratorCopier, PageLock, copier_for
from memckpt.memory.region import Region
from memckpt.state.layout import PAGE

DEVICE = torch.device("cuda", 0)


@dataclass(eq=False)
class Timeline:
    """A stream, or the host: all work that is done before whatever comes next on it."""

    done: set[Any] = field(default_factory=set)

    def wait_stream(self, other: Timeline) -> None:
        self.done |= other.done

    def synchronize(self) -> None:
        self.device.host.done |= self.done

    device: Any = None


class Event:
    def __init__(self, device: Device, blocking: bool) -> None:
        assert blocking, "whoever waits would spin"
        self._device = device
        self._done: set[Any] = set()

    def record(self, stream: Timeline) -> None:
        self._done = set(stream.done)

    def synchronize(self) -> None:
        self._device.host.done |= self._done

    def query(self) -> bool:
        assert not self._device.recording, "the graph would be spoiled"
        return self._device.host.done >= self._done


class Device:
    """Stands in for a device's module, as ``torch.cuda`` is."""

    def __init__(self) -> None:
        self.host = Timeline()
        self.current = self.Stream(DEVICE)
        self.recording = False
        #: Sizes of what is page-locked, by address; the calls that succeed at once, and the most bytes of one call.
        self.registered: dict[int, int] = {}
        self.room = threading.Semaphore(0)
        self.most_bytes = 1 << 40
        #: Sources whose memory its stream was given back before its copies.
        self.freed_early: list[int] = []

    def Stream(self, device: torch.device) -> Timeline:
        return Timeline(device=self)

    def Event(self, blocking: bool = False) -> Event:
        return Event(self, blocking)

    def current_stream(self, device: torch.device) -> Timeline:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: Timeline) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        assert device == DEVICE
        yield

    def is_current_stream_capturing(self) -> bool:
        return self.recording

    def cudart(self) -> Device:
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.room.acquire()
        if nbytes > self.most_bytes:
            return 2
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0

    def cudaGetErrorString(self, error: int) -> str:
        return {2: "out of memory"}[error]


class Source:
    """A tensor on the device whose value is being made on a stream, whose memory the stream's next work may take."""

    device = DEVICE
    _numbers = itertools.count()

    def __init__(self, device: Device, nbytes: int) -> None:
        self.nbytes = nbytes
        self.number = next(self._numbers)
        self._device, self._made_on = device, device.current
        device.current.done.add(("made", self.number))

    def __del__(self) -> None:
        if ("copied", self.number) not in self._made_on.done:
            self._device.freed_early.append(self.number)


class Slot:
    """Where a source is copied to."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def copy_(self, source: Source, non_blocking: bool) -> None:
        assert non_blocking
        stream = self._device.current
        assert ("made", source.number) in stream.done, "copied before it was made"
        stream.done.add(("copied", source.number))


@pytest.mark.parametrize("seed", range(60))
def test_no_copy_races(seed: int) -> None:
    draw, device = random.Random(seed), Device()
    copier = AcceleratorCopier(DEVICE, device)
    copier.BUCKET_BYTES = 64  # type: ignore[misc]
    streams = [device.current, *(device.Stream(DEVICE) for _ in range(2))]
    begun: list[int] = []
    tickets: list[tuple[int, int]] = []
    for _ in range(60):
        device.current = draw.choice(streams)
        match draw.choice(["copy", "copy", "copy", "change", "read", "look"]):
            case "copy":
                source = Source(device, draw.choice([4, 40, 400]))
                begun.append(source.number)
                copier.copy(Slot(device), source)  # type: ignore[arg-type]
                tickets.append((copier.ticket(), source.number))
                del source
            case "look":
                before, done = set(device.host.done), copier.done()
                assert all(("copied", source) in device.host.done for ticket, source in tickets if ticket <= done)
                assert device.host.done == before  # looking waits for nothing
            case "change":
                copier.wait_before_changes()
                assert {("copied", source) for source in begun} <= device.current.done
                assert not any(("copied", source) in device.host.done for source in begun[-1:])  # the host goes on
            case "read":
                expected = {("copied", source) for source in begun}
                wait = copier.token()
                source = Source(device, 4)
                begun.append(source.number)
                copier.copy(Slot(device), source)  # type: ignore[arg-type]
                del source
                wait()
                assert expected <= device.host.done
    copier.token()()
    assert copier.done() >= max(ticket for ticket, _ in tickets)
    copier.wait_before_changes()
    assert not device.freed_early


@pytest.mark.parametrize("steps", [1, 2])
def test_a_commit_outside_of_the_training_s_stream(steps: int) -> None:
    device = Device()
    copier = AcceleratorCopier(DEVICE, device)
    outside, streams = device.current, [device.Stream(DEVICE) for _ in range(2)]
    for _ in range(3):
        stepped = []
        for trained_on in streams[:steps]:
            device.current = trained_on
            copier.wait_before_changes()  # before an optimizer steps
            stepped.append(Source(device, 4))
        device.current = outside
        with copier.behind_training():
            for source in stepped:
                copier.copy(Slot(device), source)  # type: ignore[arg-type]
            copier.wait_before_changes()
        for trained_on in streams[:steps]:  # whose next forward may change buffers
            assert {("copied", source.number) for source in stepped} <= trained_on.done


def test_streams_that_train_no_more_are_not_waited_for() -> None:
    device = Device()
    copier = AcceleratorCopier(DEVICE, device)
    outside, former, now = device.current, *(device.Stream(DEVICE) for _ in range(2))
    for trained_on in (former, now, now):
        device.current = trained_on
        copier.wait_before_changes()
        source = Source(device, 4)
        device.current = outside
        for _ in range(2):  # a commit without a backward since: the stream may have changed buffers
            with copier.behind_training():
                assert ("made", source.number) in outside.done
    device.current = former
    unseen = Source(device, 4)
    device.current = outside
    with copier.behind_training():
        assert ("made", unseen.number) not in outside.done


def test_nothing_is_waited_for_in_a_graph() -> None:
    device = Device()
    copier = AcceleratorCopier(DEVICE, device)
    copier.copy(Slot(device), Source(device, 4))  # type: ignore[arg-type]
    device.recording = True
    before = set(device.current.done)
    copier.wait_before_changes()
    copier.done()
    assert device.current.done == before
    assert copier.recording_graph()


@pytest.fixture
def region() -> Iterator[Region]:
    region = Region.create("test", 8 * PAGE)
    yield region
    region.close()


PARTS = [(4 * PAGE, 2 * PAGE), (6 * PAGE, 2 * PAGE), (0, 4 * PAGE)]


def test_what_is_due_first_is_page_locked_first_and_the_rest_meanwhile(region: Region) -> None:
    device = Device()
    device.room.release(2)
    copier = AcceleratorCopier(DEVICE, device)
    copier.adopt(region, PARTS, at_once=3 * PAGE)  # the last part is not locked yet
    start = min(device.registered) - 4 * PAGE
    assert list(device.registered.items()) == [(start + offset, length) for offset, length in PARTS[:2]]
    device.room.release()
    copier.adopt(region, PARTS)
    assert list(device.registered.items()) == [(start + offset, length) for offset, length in PARTS]
    region.close()
    assert device.registered == {}


def test_training_goes_on_where_page_locking_is_refused(
    region: Region, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PageLock, "_told", False)
    device = Device()
    device.most_bytes = 3 * PAGE
    for _ in range(2):
        device.room.release(3)
        again = Region.open(os.dup(region.fd))
        AcceleratorCopier(DEVICE, device).adopt(again, PARTS)
        assert len(device.registered) == 2  # these are of use all the same
        again.close()
    (told,) = caplog.messages  # once
    assert (
        "16 KiB of host memory could not be page-locked: cudaHostRegister failed with error 2 (out of memory)" in told
    )


def test_devices_without_streams_or_page_locking_are_named() -> None:
    device = Device()
    assert AcceleratorCopier(DEVICE, device).caveat == ""
    device.cudart = None  # type: ignore[method-assign, assignment]
    assert "page-locks no shared memory" in AcceleratorCopier(DEVICE, device).caveat
    assert "torch has no streams for it" in copier_for(torch.device("meta")).caveat
    assert copier_for(torch.device("cpu")).caveat == ""
