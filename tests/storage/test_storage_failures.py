"""Storage that fails under a training: a full disk, a silent server, killed writers. Training goes on, bit-exact."""

from __future__ import annotations

import errno
import os
import select
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memckpt.agent.saving.schedule import Schedule
from memckpt.errors import StorageError
from memckpt.storage.catalog import read_catalog
from memckpt.storage.local_store import LocalStore
from memckpt.storage.owner import CLAIM
from memckpt.storage.store import verify_files
from tests.conftest import Bucket
from tests.support.cluster.processes import kill_and_wait
from tests.support.cluster.waiting import LIMIT_SECONDS, until
from tests.support.storage.stored_parts import part_of, save_part, write
from tests.support.storage.stored_runs import catalog_of, goes_on, stored, until_not_stored, until_ordered, until_stored
from tests.support.trainings.cli_harness import invoke
from tests.support.trainings.engine_cases import PLAIN
from tests.support.trainings.engine_child import Action, Control, kill_agent, kill_both
from tests.support.trainings.engine_harness import Ended, Lab


def in_turn(*actions: Action) -> Action:
    def act(control: Control) -> None:
        for action in actions:
            action(control)

    return act


def note_alarm(lab: Lab, command: bool = True) -> Action:
    """The trainer reports what the agent says and, with `command`, what ``memckpt status`` shows of it."""

    def note(control: Control) -> None:
        shown = " ".join(invoke("status", lab.run_dir)[1].split()) if command else ""
        control.journal.note("alarm", shown=shown, text=lab.status().storage.alarm)

    return note


def files_of(lab: Lab) -> list[str]:
    """Files of checkpoints in storage, half-written ones too."""
    return [path for path in LocalStore(lab.run_dir / "storage").find("", unfinished=True) if path != CLAIM]


# The disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB: room for two checkpoints of PLAIN."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "memckpt-test", str(place)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(disk: Path) -> Path:
    """A file that leaves no room; returns its path."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(disk).free)
    return ballast


@pytest.mark.promise(
    "a full or read-only disk or a silent server stops no training, and is used again when it recovers"
)
@pytest.mark.promise('`"replica"` (default)')
def test_a_full_disk_raises_an_alarm_and_is_used_again_once_there_is_room(small_disk: Path, lab: Lab) -> None:
    ballast = fill(small_disk)
    settings = stored("lazy", url=str(small_disk / "run"))

    def look(control: Control) -> None:
        left = LocalStore(small_disk / "run").find("", unfinished=True)
        control.journal.note("left", files=left)
        ballast.unlink()

    actions = {
        ("after commit", 3): until_ordered,
        ("after commit", 7): in_turn(until_not_stored, note_alarm(lab), look),
        ("after commit", 8): until_ordered,
        ("after commit", 12): in_turn(until_stored(10), note_alarm(lab)),
        ("backward", 13): kill_both,
    }
    died = lab.train(PLAIN, settings, actions=actions)
    assert "step 5 did not get to storage" in died.log
    during, after = died.of("alarm")
    assert "has no room for step 5: expected " in during["text"]
    assert "alarm" in during["shown"]
    assert after["text"] == ""
    assert "alarm" not in after["shown"]
    assert died.of("left")[0]["files"] == []  # what had been written gave its room back
    goes_on(lab, settings, died, 10)


def test_what_a_failed_checkpoint_had_written_gives_its_room_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full when only the commit file is missing."""
    store, part = LocalStore(tmp_path), part_of(2, full=False)
    before = write(store, part_of(1))
    full = True
    replacing = LocalStore._replacing

    def refuse(self: LocalStore, path: str) -> Any:
        if full and path == part.commit_path:
            raise OSError(errno.ENOSPC, "No space left on device")
        return replacing(self, path)

    monkeypatch.setattr(LocalStore, "_replacing", refuse)
    with pytest.raises(StorageError, match="No space left"):
        save_part(tmp_path, part, keep_last=2)
    assert [one.record for one in read_catalog(store).complete] == [1]
    assert set(store.find("", unfinished=True)) == {before.commit_path, *(file.path for file in before.files)}
    full = False
    save_part(tmp_path, part, keep_last=2)
    assert part.commit_path in store.find("")


def test_a_directory_that_cannot_be_written_any_more_raises_an_alarm(tmp_path: Path, lab: Lab) -> None:
    """Once it can be again, it is used again. What it holds can be read all the time."""
    place = tmp_path / "place"
    place.mkdir(mode=0o500)
    if os.access(place, os.W_OK):
        pytest.skip("this user may write everywhere: see the read-only disk")
    place.chmod(0o700)
    check_unwritable(lab, place, lambda _: place.chmod(0o500), lambda _: place.chmod(0o700))


@pytest.mark.promise(
    "a full or read-only disk or a silent server stops no training, and is used again when it recovers"
)
@pytest.mark.slow
def test_a_disk_that_becomes_read_only_raises_an_alarm(small_disk: Path, lab: Lab) -> None:
    def remount(how: str) -> Action:
        command = ["mount", "-o", f"remount,{how}", str(small_disk)]
        return lambda _: subprocess.run(command, check=True) and None

    check_unwritable(lab, small_disk, remount("ro"), remount("rw"))


def check_unwritable(lab: Lab, place: Path, close: Action, reopen: Action) -> None:
    settings = stored("lazy", url=str(place))
    actions = {
        ("after commit", 3): until_ordered,
        ("after commit", 1): close,
        ("after commit", 7): in_turn(until_not_stored, note_alarm(lab), reopen),
        ("after commit", 8): until_ordered,
        ("after commit", 12): until_stored(10),
        ("backward", 13): kill_both,
    }
    died = lab.train(PLAIN, settings, actions=actions)
    (alarm,) = died.of("alarm")
    assert "could not write" in alarm["text"]
    assert "alarm" in alarm["shown"]
    goes_on(lab, settings, died, 10)


# The server


@pytest.mark.promise("a disk or an object store")
@pytest.mark.promise(
    "a full or read-only disk or a silent server stops no training, and is used again when it recovers"
)
@pytest.mark.slow
def test_a_server_that_never_answers_is_given_up_and_used_again_when_it_does(
    bucket: Bucket, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = stored("lazy", url=bucket.url, timeout_seconds=15.0)
    silent, configured = lab.directory / "silent", Schedule.limit_seconds
    # A checkpoint that the server takes has all the time that this machine needs.
    monkeypatch.setattr(Schedule, "limit_seconds", lambda self: configured(self) if silent.exists() else 3600.0)
    lab.start_agent()

    def stop_answering(control: Control) -> None:
        silent.touch()
        bucket.server.stop_answering()

    def answer_again(control: Control) -> None:
        silent.unlink()
        bucket.server.answer_again()

    alarm = note_alarm(lab, command=False)  # the command would look into storage itself, and wait for it
    actions = {
        ("after commit", 3): until_ordered,
        ("after commit", 2): stop_answering,
        ("after commit", 9): in_turn(until_not_stored, alarm, answer_again),
        ("after commit", 10): until_ordered,
        ("after commit", 17): in_turn(until_stored(15), note_alarm(lab)),
        ("backward", 19): kill_both,
    }
    died = lab.train(PLAIN, settings, actions=actions)
    assert "step 5 did not get to storage: the storage took too long" in died.log
    during, after = died.of("alarm")
    assert during["text"] == "the storage took too long"
    assert after["text"] == ""
    goes_on(lab, stored("lazy", url=bucket.url), died, 15)


# The writer

#: Run by every Python that starts with it on its path. A writer stops, once, when it has written all of a file whose
#: name ends as the order says, and before the file gets its name.
_STOPPER = """
import contextlib, os, signal, sys, threading
from pathlib import Path

if "memckpt.agent.saving.writer.checkpoint_writer" in sys.orig_argv:
    from memckpt.storage.local_store import LocalStore

    order = Path(__file__).with_name("order")
    replacing = LocalStore._replacing

    @contextlib.contextmanager
    def stopping(self, path):
        with replacing(self, path) as file:
            yield file
            if order.exists() and path.endswith(order.read_text()):
                file.flush()
                order.unlink()
                order.with_name("new").write_text(str(os.getpid()))
                order.with_name("new").rename(order.with_name("pid"))
                # Stops this thread in the call. A signal to the process goes to the main thread, and this one runs on.
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    LocalStore._replacing = stopping
"""


class Stopper:
    """Has the next writer stop in the middle of a checkpoint."""

    def __init__(self, directory: Path, suffix: str) -> None:
        (directory / "sitecustomize.py").write_text(_STOPPER)
        (directory / "order").write_text(suffix)
        self._pid = directory / "pid"

    def wait(self, control: Control) -> int:
        """The pid of the writer, which has stopped."""
        until(self._pid.exists)
        pid = int(self._pid.read_text())
        until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        control.journal.note("stopped", pid=pid)
        return pid

    def kill(self, control: Control) -> None:
        kill_and_wait(self.wait(control))

    def kill_agent(self, control: Control) -> None:
        """The agent dies while the writer writes; returns when both are dead."""
        writer = os.pidfd_open(self.wait(control))
        kill_agent(control)
        assert select.select([writer], [], [], LIMIT_SECONDS)[0]
        os.close(writer)


@pytest.fixture(params=[".distcp", ".json"], ids=["in the data", "before the commit"])
def stopper(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stopper:
    directory = tmp_path / "path"
    directory.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(directory), prepend=os.pathsep)
    return Stopper(directory, request.param)


def note_storage(lab: Lab) -> Action:
    def note(control: Control) -> None:
        steps = [one.step for one in catalog_of(lab).complete]
        control.journal.note("storage", steps=steps, files=files_of(lab))

    return note


def check_only_the_later_one_stands(lab: Lab, died: Ended, step: int) -> dict[str, Any]:
    """The checkpoint whose writing was killed has left nothing, the next one is of `step`, and training resumes there.

    Returns what was noted of storage behind the later one.
    """
    killed, later = died.of("storage")
    assert killed["steps"] == []
    assert any(".partial-" in path for path in killed["files"])
    assert later["steps"] == [step]
    assert not set(killed["files"]) & set(later["files"])
    goes_on(lab, stored("lazy"), died, step)
    return later


@pytest.mark.promise("a killed writer costs one checkpoint, and its unfinished files are never used and are deleted")
@pytest.mark.promise('`"replica"` (default)')
@pytest.mark.slow
def test_a_writer_that_is_killed_is_followed_by_another_and_leaves_nothing(stopper: Stopper, lab: Lab) -> None:
    settings = stored("lazy")
    actions = {
        ("after commit", 3): until_ordered,
        ("after commit", 7): in_turn(stopper.kill, note_storage(lab), until_not_stored, note_alarm(lab)),
        ("after commit", 8): until_ordered,
        ("after commit", 12): in_turn(until_stored(10), note_storage(lab)),
        ("backward", 14): kill_both,
    }
    died = lab.train(PLAIN, settings, actions=actions)
    assert len(died.of("stopped")) == 1
    assert died.of("alarm")[0]["text"] == "the process has ended"
    later = check_only_the_later_one_stands(lab, died, 10)
    point = {path.partition("/000000000010")[2] for path in later["files"]}
    assert point == {"/.metadata", "/node/.metadata", "/node/__0_0.distcp", "/node.json", "/node.msgpack"}


@pytest.mark.promise("a killed writer costs one checkpoint, and its unfinished files are never used and are deleted")
@pytest.mark.slow
def test_an_agent_that_dies_while_its_writer_writes_leaves_nothing_to_trust(stopper: Stopper, lab: Lab) -> None:
    """The next agent's first checkpoint is whole, and what the dead one's writer left is gone."""
    settings = stored("lazy")
    actions = {
        ("after commit", 3): until_ordered,
        ("after commit", 7): in_turn(stopper.kill_agent, note_storage(lab)),
        ("after commit", 12): until_ordered,
        ("after commit", 17): in_turn(until_stored(15), note_storage(lab)),
        ("backward", 19): kill_both,
    }
    died = lab.train(PLAIN, settings, actions=actions)
    check_only_the_later_one_stands(lab, died, 15)


@pytest.mark.promise("a killed writer costs one checkpoint, and its unfinished files are never used and are deleted")
@pytest.mark.slow
def test_a_half_written_checkpoint_is_never_resumed_from(stopper: Stopper, lab: Lab) -> None:
    """Agent, writer and trainer die: with nothing else in storage training starts over, and cleans up later."""
    settings = stored("lazy")
    ordered: dict[tuple[str, int], Action] = {("after commit", 3): until_ordered}
    die = in_turn(stopper.kill_agent, kill_trainer)
    first = lab.train(PLAIN, settings, actions={**ordered, ("after commit", 7): die})
    half = files_of(lab)
    assert any(".partial-" in path for path in half)
    second = lab.train(PLAIN, settings, actions={**ordered, ("after commit", 7): in_turn(until_stored(5), kill_both)})
    assert second.restored_step is None
    assert not set(half) & set(files_of(lab))
    final = lab.train(PLAIN, settings, seed=3)
    assert final.restored_step == 5
    lab.check_same(PLAIN, first, second, final)
    catalog = catalog_of(lab)
    assert len(catalog.complete) == len(catalog.checkpoints) == 2
    assert [verify_files(LocalStore(lab.run_dir / "storage"), one.part_files) for one in catalog.complete] == [[], []]


def kill_trainer(control: Control) -> None:
    control.journal.note("killed", who="trainer", step=control.step)
    os.kill(os.getpid(), signal.SIGKILL)
