"""Another user of the node, tried as one: it gets no answer of an agent, and none of its memory."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from memckpt.errors import AgentError
from memckpt.processes.address import AgentAddress
from memckpt.storage.local_store import LocalStore
from memckpt.storage.owner import keep_run
from tests.support.trainings.engine_harness import Lab

NOBODY = 65534

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def as_nobody(lab: Lab, tried: Callable[[], str]) -> str:
    """What another user has found out."""

    def body() -> None:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        print("found", tried(), flush=True)
        os._exit(0)

    child = lab.fork(body, "stranger")
    assert child.wait() == 0, child.log.read_text()
    return child.log.read_text().partition("found ")[2].strip()


def test_an_agent_does_not_answer_another_user(lab: Lab) -> None:
    lab.start_agent()
    serving = AgentAddress.of(lab.run_dir).serving()
    assert serving is not None

    def connect() -> str:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(20)
            sock.connect(f"\0{serving.socket}")
            return repr(sock.recv(100))

    assert as_nobody(lab, connect) == "b''"
    assert lab.agent_answers()

    def refused_by_us() -> str:
        found = []
        for path in (f"/proc/{serving.pid}/mem", f"/proc/{serving.pid}/fd/{serving.descriptor}"):
            try:
                with open(path, "rb"):
                    found.append(path)
            except PermissionError:
                continue
        with contextlib.suppress(PermissionError):
            found += [str(each) for each in Path(f"/proc/{serving.pid}/fd").iterdir()]
        return repr(found)

    assert as_nobody(lab, refused_by_us) == "[]"
    lab.stop()


def test_a_trainer_does_not_take_another_user_s_agent_for_its_own(lab: Lab) -> None:
    lab.start_agent()
    address = AgentAddress.of(lab.run_dir)
    serving = address.serving()
    assert serving is not None

    def connect() -> str:
        try:
            address._connect_to(serving)
        except AgentError as error:
            return str(error)
        return "connected"

    assert f"runs as uid 0; expected this user, {NOBODY}" in as_nobody(lab, connect)
    lab.stop()


@pytest.mark.parametrize(("umask", "read"), [(0o022, True), (0o077, False)])
def test_what_another_user_can_do_to_the_files_of_a_run(lab: Lab, umask: int, read: bool) -> None:
    """It reads them where the umask says so, and changes none: neither the agent's files nor those in storage."""
    before = os.umask(umask)
    try:
        lab.start_agent()
        LocalStore(lab.run_dir / "storage").write("base/x", b"weights")
        keep_run(lab.run_dir, "run")
        place = os.open(lab.run_dir, os.O_PATH)
    finally:
        os.umask(before)
    names = sorted(str(each.relative_to(lab.run_dir)) for each in lab.run_dir.rglob("*") if each.is_file())
    assert {"storage/base/x", "run.json"} <= set(names)
    assert any(name.startswith("agent-") for name in names)

    def tried() -> str:
        done = []
        for what, flags in {"read": os.O_RDONLY, "write": os.O_WRONLY, "append": os.O_APPEND | os.O_WRONLY}.items():
            for name in names:
                with contextlib.suppress(PermissionError):
                    os.close(os.open(name, flags, dir_fd=place))
                    done.append(f"{what} {name}")
        for name in names:
            with contextlib.suppress(PermissionError):
                os.unlink(name, dir_fd=place)
                done.append(f"remove {name}")
        for directory in (".", "storage", "storage/base"):
            with contextlib.suppress(PermissionError):
                os.close(os.open(f"{directory}/new", os.O_CREAT | os.O_WRONLY, dir_fd=place))
                done.append(f"make one in {directory}")
        return repr(done)

    assert as_nobody(lab, tried) == repr([f"read {name}" for name in names] if read else [])
    os.close(place)
    lab.stop()
