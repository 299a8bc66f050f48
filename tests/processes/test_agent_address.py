"""A run's agent is found by what the run directory says, is nobody's child, and starts once."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from memckpt.agent.__main__ import lower_oom_score
from memckpt.cli.common import no_agent
from memckpt.config import AgentConfig
from memckpt.errors import AgentError, AgentGoneError, AgentNotFoundError
from memckpt.processes import address as address_module
from memckpt.processes import launch
from memckpt.processes.address import AgentAddress, ServingAgent
from memckpt.processes.control import ask_status, stop_agent
from memckpt.protocol.descriptors import readable
from tests.support.cluster.processes import children, kill_and_wait
from tests.support.trainings.cli_harness import invoke
from tests.support.trainings.engine_harness import Lab


@pytest.fixture
def address(tmp_path: Path) -> AgentAddress:
    return AgentAddress.of(tmp_path, "node")


def withdrawn(address: AgentAddress) -> ServingAgent:
    """An agent that leaves."""
    listener = address.listen()
    with address.starting():
        address.withdraw(listener.serving)
    listener.close()
    return listener.serving


@pytest.mark.promise(
    "an agent is found whatever happens to the environment, and survives a kill of the trainer's process tree"
)
def test_runs_and_nodes_have_addresses_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    addresses = [AgentAddress.of(tmp_path / run, node) for run in ("a", "b") for node in ("x", "y")]
    assert len({address.file_path for address in addresses}) == 4
    assert AgentAddress.of(tmp_path / "link", "x") == addresses[0]


def test_a_file_that_cannot_be_read_is_an_error_with_a_remedy(address: AgentAddress) -> None:
    address.file_path.mkdir()  # root reads every file
    with pytest.raises(AgentError, match=r"expected a run directory whose agent-node.json this user, .* can read"):
        address.serving()


def test_an_agent_is_found_whatever_becomes_of_the_environment(
    tmp_path: Path, address: AgentAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Directories for temporary and for runtime files go, at logout for example, and another trainer has others."""
    places = [tmp_path / "before", tmp_path / "after"]
    for variable in ("TMPDIR", "XDG_RUNTIME_DIR", "MEMCKPT_RUNTIME_DIR"):
        monkeypatch.setenv(variable, str(places[0]))
    places[0].mkdir(mode=0o700)
    listener = address.listen()
    assert not list(places[0].iterdir())
    shutil.rmtree(places[0])
    for variable in ("TMPDIR", "XDG_RUNTIME_DIR", "MEMCKPT_RUNTIME_DIR"):
        monkeypatch.setenv(variable, str(places[1]))
    for listening in list(listener.sockets):
        sock = address.connect()
        listening.accept()[0].close()
        sock.close()
        listening.close()  # the next one gets through to the other socket, as from another network namespace
    listener.close()


def test_nobody_answers_where_there_is_no_agent(lab: Lab) -> None:
    address = AgentAddress.of(lab.run_dir)
    assert address.connect() is None
    killed = lab.start_agent()
    kill_and_wait(killed.pid)
    assert address.serving() is not None, "an agent that is killed leaves its file"
    assert address.connect() is None
    killed.wait()


def test_where_no_agent_answers_the_runs_below_are_named(tmp_path: Path) -> None:
    for name in ("one", "two", "no-run"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ("run.json" if "no" not in name else "notes.json")).write_text("{}")
    said = no_agent(AgentAddress.of(tmp_path, "node"))
    assert said.endswith(f"; there are runs below it: {tmp_path}/one, {tmp_path}/two")
    assert "below" not in no_agent(AgentAddress.of(tmp_path / "one", "node"))


@pytest.mark.parametrize("content", [b"", b"{}", b'{"pid": 1', b"\xff"], ids=repr)
def test_a_file_that_names_no_agent_hinders_nobody(address: AgentAddress, content: bytes) -> None:
    address.file_path.write_bytes(content)
    assert address.connect() is None
    address.remove_address(withdrawn(address))
    assert not list(address.run_dir.iterdir())


@pytest.mark.parametrize("change", [{"boot": "another"}, {"pid_namespace": 1}, {"start_ticks": 1}, {"pid": 2**22 + 1}])
def test_a_file_of_another_life_of_the_machine_is_stale(address: AgentAddress, change: dict[str, Any]) -> None:
    listener = address.listen()
    listener.close()
    stale = msgspec.structs.replace(listener.serving, **change)
    address.file_path.write_bytes(msgspec.json.encode(stale))
    assert address.connect() is None


def test_an_agent_that_lives_and_cannot_be_reached_is_named(
    address: AgentAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address_module, "_END_SECONDS", 0.0)
    listener = address.listen()
    listener.close()
    with pytest.raises(AgentError, match=f"agent pid {os.getpid()} serves .* cannot be reached"):
        address.connect()


@pytest.mark.promise("a new agent after the death of the last one")
def test_an_agent_that_accepts_nothing_is_not_waited_for_long(
    address: AgentAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address_module, "BACKLOG", 0)
    monkeypatch.setattr(address_module, "_CONNECT_SECONDS", 0.01)
    listener = address.listen()
    first = address.connect()
    with pytest.raises(AgentGoneError, match="has accepted no connection"):
        address.connect()
    first.close()
    listener.close()


def test_who_has_left_takes_only_its_own_file(address: AgentAddress) -> None:
    old, new = address.listen(), address.listen()
    with address.starting():
        address.withdraw(old.serving)
    assert address.serving() == new.serving
    for listener in (old, new):
        listener.close()


def test_an_agent_that_leaves_is_known_until_it_has_ended(address: AgentAddress) -> None:
    """Others of the same directory have their own; a file of one that has been killed hinders nobody."""
    serving = withdrawn(address)
    assert address.serving() is None
    assert address.leaving() == [serving]
    others = [AgentAddress.of(address.run_dir, name) for name in (f"{address.node}-1", address.node[:-1], ".*")]
    assert not any(other.leaving() for other in others)
    address.remove_address(serving)
    assert not list(address.run_dir.iterdir())
    killed = msgspec.structs.replace(serving, start_ticks=1)
    address.leaving_path(killed).write_bytes(msgspec.json.encode(killed))
    address.await_leaving(1000.0, logging.getLogger())
    assert not address.leaving()


def test_a_leaving_file_that_was_cut_off_is_removed_and_a_directory_that_cannot_be_read_ends_no_start(
    address: AgentAddress, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torn = address.run_dir / f"leaving-{address.node}-17.json"
    torn.write_bytes(b'{"pid": 1')
    address.await_leaving(1000.0, logging.getLogger("memckpt"))
    assert not torn.exists()
    assert not caplog.text

    def fail(path: Path) -> None:
        raise PermissionError("not for this user")

    monkeypatch.setattr(Path, "iterdir", fail)
    address.await_leaving(1000.0, logging.getLogger("memckpt"))
    assert "still writes is not known: not for this user" in caplog.text


def test_an_agent_that_does_not_end_is_not_waited_for_for_ever(
    address: AgentAddress, caplog: pytest.LogCaptureFixture
) -> None:
    withdrawn(address)
    address.await_leaving(0.01, logging.getLogger("memckpt"))
    assert "has not ended within 0 s; the start goes on" in caplog.text
    assert address.leaving(), "another start may wait again"


def test_a_run_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(AgentError, match="choose another run directory"):
        AgentAddress.of(tmp_path / "file", "node").listen()


@pytest.mark.promise("a new agent after the death of the last one")
def test_starters_wait_for_each_other_and_not_for_a_dead_one(lab: Lab) -> None:
    address = AgentAddress.of(lab.directory)
    read_fd, write_fd = os.pipe()

    def hold() -> None:
        with address.starting():
            os.write(write_fd, b"x")
            signal.pause()

    holder = lab.fork(hold, "holder")
    assert os.read(read_fd, 1) == b"x"
    entered = threading.Event()

    def enter() -> None:
        with address.starting():
            entered.set()

    waiting = threading.Thread(target=enter)
    waiting.start()
    assert holder.alive()
    assert not entered.is_set()
    kill_and_wait(holder.pid)
    waiting.join(20)
    assert entered.is_set()
    for fd in (read_fd, write_fd):
        os.close(fd)
    assert not list(address.run_dir.glob("*.json*"))


# Directories that are copied or moved


@pytest.fixture
def served(tmp_path: Path) -> Iterator[AgentAddress]:
    """A run directory for which this process listens."""
    address = AgentAddress.of(tmp_path / "original", "node")
    address.run_dir.mkdir()
    listener = address.listen()
    yield address
    listener.close()


def is_found(run_dir: Path) -> bool:
    sock = AgentAddress.of(run_dir, "node").connect()
    if sock is not None:
        sock.close()
    return sock is not None


@pytest.mark.parametrize("moved", [False, True], ids=["where it was", "moved"])
@pytest.mark.parametrize("seen", [False, True], ids=["from another PID namespace", "from its own"])
def test_a_copy_does_not_find_the_agent_of_the_original(
    served: AgentAddress, tmp_path: Path, moved: bool, seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever both are; what the agent's directory is now is seen in its own PID namespace only."""
    original, copy = served.run_dir, tmp_path / "copy"
    if not seen:
        monkeypatch.setattr(address_module, "_pid_namespace", lambda: 1)
    if moved:
        original = original.rename(tmp_path / "moved")
    shutil.copytree(original, copy)
    assert is_found(original)
    assert is_found(copy) == (moved and not seen), "the file says where the directory was"
    if not (moved and not seen):
        assert AgentAddress.of(copy, "node").original() == str(original)
        assert f"is a copy of {original}" in no_agent(AgentAddress.of(copy, "node"))


def test_a_copy_in_the_place_of_the_original_does_not_find_its_agent(served: AgentAddress, tmp_path: Path) -> None:
    moved = served.run_dir.rename(tmp_path / "moved")
    shutil.copytree(moved, served.run_dir)
    assert is_found(moved)
    assert not is_found(served.run_dir)


@pytest.mark.parametrize(
    "change", [{"inode": 0}, {"device": 0}, {"directory": "/elsewhere"}, {"directory": ""}], ids=repr
)
def test_an_agent_whose_directory_is_not_seen_elsewhere_is_found(served: AgentAddress, change: dict[str, Any]) -> None:
    """As from another mount namespace, on file systems that number anew, and for files of earlier versions."""
    serving = served.serving()
    assert serving is not None
    served.file_path.write_bytes(msgspec.json.encode(msgspec.structs.replace(serving, **change)))
    assert is_found(served.run_dir)


def test_a_directory_has_one_agent_on_all_its_paths(served: AgentAddress, tmp_path: Path) -> None:
    """A bind mount cannot be made here; a path through another process's root leads to the same directory."""
    (tmp_path / "link").symlink_to(served.run_dir)
    assert is_found(tmp_path / "link")
    other_path = AgentAddress(Path(f"/proc/self/root{served.run_dir}"), "node")
    sock = other_path.connect()
    sock.close()


def test_stopping_a_copy_stops_nothing_and_a_moved_directory_keeps_its_agent(lab: Lab) -> None:
    agent = lab.start_agent()
    copy, moved = lab.directory / "copy", lab.directory / "moved"
    shutil.copytree(lab.run_dir, copy)
    assert ask_status(AgentAddress.of(copy)) is None
    assert stop_agent(AgentAddress.of(copy)) is None
    for command in (["stop", copy], ["export", copy, "--to", lab.directory / "exported", "--from", "memory"]):
        with pytest.raises(AgentNotFoundError, match=f"is a copy of {lab.run_dir}, "):
            invoke(*command)
    own = lab.start_agent(copy)
    assert f"is a copy of {lab.run_dir}" in own.log.read_text()
    lab.run_dir.rename(moved)
    status = ask_status(AgentAddress.of(moved))
    assert (status.pid, status.run_dir) == (agent.pid, str(moved))
    assert stop_agent(AgentAddress.of(copy)) == own.pid
    assert agent.alive()
    assert stop_agent(AgentAddress.of(moved)) == agent.pid
    assert AgentAddress.of(moved).serving() is None, "it has withdrawn its file from where the directory is"
    assert (agent.wait(), own.wait()) == (0, 0)


# Starting one


def test_an_agent_is_nobody_s_child_and_outlives_the_tree_of_its_trainer(lab: Lab) -> None:
    """A launcher that walks the trainer's children does not find it, nor one that kills sessions or groups."""
    address = AgentAddress.of(lab.run_dir)

    def trainer() -> None:
        Path("/proc/self/oom_score_adj").write_text("700")
        spawned = launch.spawn_agent(address, AgentConfig(linger_seconds=60.0))
        assert not children()
        assert os.getsid(spawned) == os.getpgid(spawned) == spawned

    child = lab.fork(trainer, "trainer")
    assert child.wait() == 0, child.log.read_text()
    status = ask_status(address)
    assert int(Path(f"/proc/{status.pid}/oom_score_adj").read_text()) <= 0
    assert stop_agent(address) == status.pid


@pytest.mark.parametrize(
    ("found", "least", "lowered"), [(700, 0, 0), (700, -1000, -500), (700, 300, 700), (-900, -900, -900), (0, 0, 0)]
)
def test_a_score_is_lowered_as_far_as_permitted(found: int, least: int, lowered: int) -> None:
    class Score:
        """/proc/self/oom_score_adj, for a process that may not set less than `least`."""

        value = found

        def read_text(self) -> str:
            return f"{self.value}\n"

        def write_text(self, text: str) -> None:
            if int(text) < least:
                raise PermissionError("Permission denied")
            self.value = int(text)

    score: Any = Score()
    assert lower_oom_score(score) == score.value == lowered


def test_an_agent_that_cannot_start_says_why(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    running = lab.start_agent()
    with pytest.raises(AgentError, match=f"RunBusyError: an agent already serves .* \\(pid {running.pid}\\)"):
        launch.spawn_agent(AgentAddress.of(lab.run_dir), AgentConfig())
    lab.stop()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")
        with pytest.raises(AgentError, match="it ended with status 1"):
            launch.spawn_agent(AgentAddress.of(lab.run_dir), AgentConfig())


@pytest.mark.promise("a new agent after the death of the last one")
def test_an_agent_that_does_not_answer_in_time_is_ended(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both the process that starts it and the agent itself, which is named by the first."""
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    os.set_inheritable(write_fd, True)
    program = lab.directory / "stuck"
    program.write_text(
        f"#!{sys.executable}\nimport os, signal, sys\nsys.path.insert(0, {str(Path(launch.__file__).parents[2])!r})\n"
        "from memckpt.agent.__main__ import detach\nfd = int(sys.argv[sys.argv.index('--ready-fd') + 1])\n"
        "os.close(0)\nsignal.pause() if detach(fd) else None\n"
    )
    program.chmod(0o755)
    address = AgentAddress.of(lab.run_dir)
    # Not before the agent is there: the time is over as soon as the starter has named it.
    ended = threading.Event()

    def named(descriptor: int, timeout: float) -> bool:
        return False if ended.is_set() else (ended.set(), readable(descriptor, 20))[1]

    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(program))
        patch.setattr(launch, "readable", named)
        with pytest.raises(AgentError, match="did not answer within"):
            launch.spawn_agent(address, AgentConfig())
    for fd in (read_fd, write_fd):
        os.close(fd)


def test_a_removed_file_is_told_from_a_disk_that_is_away(tmp_path: Path) -> None:
    address = AgentAddress.of(tmp_path / "disk" / "run")
    address.run_dir.mkdir(parents=True)
    address.file_path.touch()
    assert not address.was_removed()
    address.file_path.unlink()
    assert address.was_removed()
    address.run_dir.rmdir()
    assert address.was_removed()
    address.run_dir.parent.rmdir()
    assert not address.was_removed()
