"""Conclusions of ``memckpt doctor`` about the storage of checkpoints. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args
from urllib.parse import urlsplit

from memckpt.cli.common import count
from memckpt.config import RedoMode, StorageConfig
from memckpt.user_messages import nbytes_text, short_number
from memckpt_tools.doctor.checks import STATE_BYTES, Check, bytes_per_parameter

_LITTLE_ROOM = 5 << 30
#: Bytes per second; at a lower rate a checkpoint of 100M parameters takes more than half a minute.
_SLOW_DISK = 40e6
_LOST_WITH = {
    "tmpfs": "the machine's memory",
    "ramfs": "the machine's memory",
    "overlay": "the container",
    "aufs": "the container",
}
_DRIVERS = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}


def check_driver(url: str, installed: Mapping[str, str | None]) -> Check | None:
    """The package that opens an object store; None: a directory, or a scheme without a known package."""
    driver = _DRIVERS.get(urlsplit(url).scheme)
    if driver is None:
        return None
    version = installed.get(driver)
    if version is None:
        return Check(driver, "problem", f"not installed; {url} needs it", f"pip install {driver}")
    return Check(driver, "ok", version)


@dataclass(frozen=True)
class StoreFacts:
    """Findings in a run's storage.

    Attributes:
        url: location.
        problem: why it could not be read; empty if it could.
        foreign: a message that it belongs to another run; else empty.
        checkpoints: number of complete checkpoints.
        step: newest step that can be produced; None: none.
        nbytes: bytes of the newest checkpoint.
        wrong: messages about damaged, missing and unreadable files.
        others: ids of other runs with files in the store.
        beside: other run directories next to this one.
        owner: id of the run that the store belongs to, where no run was named; else empty.
    """

    url: str
    problem: str = ""
    foreign: str = ""
    checkpoints: int = 0
    step: int | None = None
    nbytes: int = 0
    wrong: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    owner: str = ""


def check_content(facts: StoreFacts) -> Check:
    """The checkpoints that a resume would find in storage."""
    name = "checkpoints"
    if facts.problem:
        return Check(name, "problem", facts.problem, "make storage readable: a resume would wait for it, and then fail")
    if facts.foreign:
        return Check(name, "problem", facts.foreign, "the run's own storage.url; see docs/storage.md#whose-a-store-is")
    if facts.wrong:
        more = f" (and {len(facts.wrong) - 1} more)" if len(facts.wrong) > 1 else ""
        return Check(name, "warning", f"{facts.wrong[0]}{more}", "memckpt verify RUN, and --repair for what is damaged")
    if facts.step is None:
        return Check(name, "ok", f"none in {facts.url}")
    whole = count(facts.checkpoints, "complete one") + (f" of the run {facts.owner!r}" if facts.owner else "")
    text = f"{whole}; a resume from storage takes step {facts.step}, if its content is right (memckpt verify)"
    return Check(name, "ok", text)


def check_other_runs(facts: StoreFacts) -> Check:
    """Other runs in the same store or beside the run directory."""
    if facts.others:
        said = f"{facts.url} also has files of {', '.join(facts.others)}, which are left alone"
        return Check("other runs", "warning", said, "a storage.url for each run")
    return Check("other runs", "ok", f"beside this one: {', '.join(facts.beside)}")


def check_room(nbytes: int, disk: DiskFacts | None, available: int | None) -> list[Check]:
    """Whether disk and memory suffice for this run's model.

    Args:
        nbytes: bytes of a checkpoint of the run.
        disk: the disk of the checkpoints; None: an object store.
        available: available memory in bytes; None: an agent holds the model already.
    """
    checks = []
    if disk is not None:
        copies = StorageConfig().keep_last + 1
        text = f"{nbytes_text(disk.free)} free; a checkpoint of this run takes {nbytes_text(nbytes)}"
        if disk.free < nbytes:
            checks.append(Check("room of the run", "problem", text, "make room: the next checkpoint does not fit"))
        elif disk.free < copies * nbytes:
            remedy = f"make room for {copies} in all; or StorageConfig(keep_last=1)"
            checks.append(Check("room of the run", "warning", text, remedy))
        else:
            checks.append(Check("room of the run", "ok", text))
    if available is not None:
        modes: tuple[RedoMode, ...] = get_args(RedoMode)
        needed = {mode: int(nbytes / STATE_BYTES * bytes_per_parameter(mode)) for mode in modes}
        fits = [mode for mode in modes if needed[mode] <= available * 0.95]
        text = "this run takes about " + ", ".join(f"{nbytes_text(needed[mode])} ({mode})" for mode in modes)
        text += f", less with its ranks on several nodes; {nbytes_text(available)} are available"
        if fits:
            checks.append(Check("memory of the run", "ok", text))
        else:
            remedy = "more memory or nodes, fewer slots, or a longer anchor_period_steps"
            checks.append(Check("memory of the run", "warning", text, remedy))
    return checks


@dataclass(frozen=True)
class DiskFacts:
    """Result of writing and syncing a file where checkpoints would be.

    Attributes:
        directory: the nearest existing directory.
        filesystem: type of its file system.
        free: free bytes.
        bytes_per_second: rate; None: the write failed, or too few bytes are free to measure it.
        problem: error of the write; empty: none.
    """

    directory: str
    filesystem: str
    free: int
    bytes_per_second: float | None
    problem: str = ""


def check_disk(facts: DiskFacts) -> list[Check]:
    """Whether a disk is writable, fast, large enough, and persistent."""
    where = f"{facts.directory} ({facts.filesystem})"
    checks = []
    if facts.problem:
        remedy = "another location: StorageConfig(url=...), or the permission to write there"
        checks.append(Check("storage", "problem", f"{where} cannot be written: {facts.problem}", remedy))
    else:
        if facts.bytes_per_second is None:
            text = f"{where}: can be written; no rate was measured, as only {nbytes_text(facts.free)} are free"
        else:
            text = f"{where}: {nbytes_text(facts.bytes_per_second)}/s, written and synced"
        if facts.filesystem in _LOST_WITH:
            text += f"; its files are lost with {_LOST_WITH[facts.filesystem]}"
            checks.append(Check("storage", "warning", text, "a persistent disk or volume: StorageConfig(url=...)"))
        elif facts.bytes_per_second is not None and facts.bytes_per_second < _SLOW_DISK:
            remedy = "a faster disk; until then checkpoints are written less often"
            checks.append(Check("storage", "warning", text, remedy))
        else:
            checks.append(Check("storage", "ok", text))
    # One more than keep_last: the oldest is deleted only after the newest has been verified.
    copies = 3
    fits = short_number(facts.free / STATE_BYTES / copies, 0)
    text = f"{nbytes_text(facts.free)} free; {copies} checkpoints of {fits} parameters (fp32, Adam) fit"
    if facts.free < _LITTLE_ROOM:
        checks.append(Check("room", "warning", text, "make room, or StorageConfig(keep_last=1)"))
    else:
        checks.append(Check("room", "ok", text))
    return checks


def check_store(url: str, seconds: float, problem: str) -> Check:
    """Result of writing, reading and deleting an object in `seconds`; `problem`: the error, empty: none."""
    if problem:
        remedy = "bucket, credentials, endpoint and bucket policy: objects must be listed, written, read and deleted"
        return Check("storage", "problem", problem, remedy)
    return Check("storage", "ok", f"{url}: an object was written, read and deleted in {seconds:.1f} s")


def check_place(problem: str) -> Check:
    """A URL that cannot be opened; `problem` is the error."""
    return Check("storage", "problem", problem, "correct --url, MEMCKPT_STORAGE_URL or storage.url")
