"""``memckpt doctor``: the facts on the machine that runs it, and the command."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memckpt.config import ErasureConfig
from memckpt.errors import AgentError, ConfigurationError
from memckpt.memory import budget
from memckpt.processes.address import AgentAddress
from memckpt.storage.local_store import LocalStore
from memckpt.storage.owner import keep_run
from memckpt.storage.urls import open_store
from memckpt_tools.doctor import checks
from memckpt_tools.doctor import probes as facts
from memckpt_tools.doctor.checks import Check
from tests.support.monitoring.statuses import an_agent, some_peers
from tests.support.storage.stored_parts import part_of, write
from tests.support.trainings.cli_harness import invoke, invoke_json

# Facts


def test_a_torch_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert facts.torch_facts()[0] == ""
    monkeypatch.setitem(sys.modules, "torch", None)
    assert facts.torch_facts() == ("ModuleNotFoundError: import of torch halted; None in sys.modules", 0, False)


def test_kernel_features_that_are_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    assert facts.missing_kernel_features() == ()

    def forbidden(*_: Any) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", forbidden)
    monkeypatch.setattr(os, "memfd_create", forbidden)
    monkeypatch.setattr(facts, "start_ticks", lambda pid: 0)
    assert facts.missing_kernel_features() == ("/proc", "pidfd_open", "memfd_create")


def test_listening_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))
    assert facts.try_sockets() == ""
    assert len(os.listdir("/proc/self/fd")) == before

    def forbidden(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(socket, "socket", forbidden)
    assert "not permitted" in facts.try_sockets()


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("0::/system.slice/train.service\n", "train.service"),
        ("9:name=systemd:/system.slice/train.service\n4:memory:/x\n", "train.service"),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/terminal.scope\n", None),
        ("0::/\n", None),
    ],
)
def test_the_systemd_service(text: str, unit: str | None) -> None:
    assert facts.systemd_service(text) == unit


def test_the_file_system_of_a_path() -> None:
    mounts = (
        "/dev/vda / ext4 rw 0 0\n"
        "tmpfs /dev/shm tmpfs rw 0 0\n"
        "server:/x /mnt/my\\040data nfs4 rw 0 0\n"
        "overlay /over overlay rw 0 0\n"
        "/dev/vdb /over xfs rw 0 0\n"
    )
    kinds = {
        "/": "ext4",
        "/home/me": "ext4",
        "/dev/shm": "tmpfs",
        "/dev/shmoo": "ext4",
        "/mnt/my data/runs": "nfs4",
        "/over/x": "xfs",
    }
    assert {path: facts.filesystem_of(Path(path), mounts) for path in kinds} == kinds


def test_the_disk_is_tried_and_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = facts.try_disk(LocalStore(tmp_path / "run" / "storage"), nbytes=1 << 20)
    assert found.directory == str(tmp_path)
    assert found.bytes_per_second is not None
    assert found.free > 0
    assert list(tmp_path.iterdir()) == []

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    found = facts.try_disk(LocalStore(tmp_path), nbytes=1 << 20)
    assert found.bytes_per_second is None
    assert "No space left" in found.problem
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("free", "written", "rated"),
    [
        (400 << 20, 24 << 20, True),
        (80 << 20, 20 << 20, True),
        (64 << 20, 16 << 20, True),
        (63 << 20, 4096, False),
        (8 << 20, 4096, False),
        (0, 4096, False),
    ],
)
def test_the_trial_of_a_disk_leaves_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, written: int, rated: bool
) -> None:
    """A training beside it must not find its storage full meanwhile."""
    sizes = []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    monkeypatch.setattr(os, "fsync", lambda fd: sizes.append(os.fstat(fd).st_size))
    found = facts.try_disk(LocalStore(tmp_path), nbytes=24 << 20)
    assert sizes == [written]
    assert (found.bytes_per_second is not None) == rated
    assert found.problem == ""
    said = checks.check_disk(found)[0].text
    assert ("no rate was measured" in said) != rated
    assert list(tmp_path.iterdir()) == []


def test_an_object_store_is_tried_and_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(f"memory://{tmp_path.name}")
    assert facts.try_store(store)[1] == ""
    assert store.find("") == []
    monkeypatch.setattr(store, "read", lambda path: b"something else")
    assert "differs from the one written" in facts.try_store(store)[1]
    assert store.find("") == []


def test_the_libraries_of_peers_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    backends, problem = facts.erasure_facts()
    assert problem == ""
    assert ErasureConfig().backend in backends
    assert facts.transport_facts()[1:] == (True, "")
    for module in ("pyeclib.ec_iface", "zmq"):
        monkeypatch.setitem(sys.modules, module, None)
    assert facts.erasure_facts()[0] == ()
    assert "ModuleNotFoundError" in facts.erasure_facts()[1]
    assert "ModuleNotFoundError" in facts.transport_facts()[2]


def test_an_agent_that_cannot_be_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: AgentAddress) -> None:
        raise AgentError("a message could not be understood")

    monkeypatch.setattr(facts, "ask_status", refuse)
    assert facts.ask_agent(tmp_path) == (None, "a message could not be understood")


def test_the_number_of_nodes_is_what_somebody_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_NUM_NODES", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert facts.job_nodes(None) == 1
    assert facts.job_nodes(an_agent(peers=some_peers())) == 3
    monkeypatch.setenv("WORLD_SIZE", "64")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert facts.job_nodes(None) == 8
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "9")
    assert facts.job_nodes(None) == 9


def test_limits_on_descriptors_are_those_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = (256, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits if which == resource.RLIMIT_NOFILE else None)
    assert facts.descriptor_limits() == (256, None)


def test_a_store_is_looked_into(tmp_path: Path) -> None:
    for name in ("A", "B", "C"):
        keep_run(tmp_path / name, f"{name}-1")
    store = LocalStore(tmp_path / "A" / "storage")
    for record in (1, 2):
        write(store, part_of(record, run="A-1"))
    found = facts.look_into_store(store, tmp_path / "A")
    assert (found.checkpoints, found.step, found.beside, found.wrong) == (2, 2, ("B", "C"), ())
    assert found.nbytes > 0
    (store.root / part_of(2).base_directory / "__0_0.distcp").unlink()
    found = facts.look_into_store(store, tmp_path / "A")
    assert (found.checkpoints, found.step, len(found.wrong)) == (1, 1, 1)
    assert "belongs to the run 'A-1'" in facts.look_into_store(store, tmp_path / "B").foreign
    write(store, part_of(3, run="D-1"))
    assert facts.look_into_store(store, tmp_path / "A").others == ("D-1",)


# The command


def looked(*arguments: Any) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit status of the command, and what it says of each check."""
    code, found = invoke_json("doctor", *arguments)
    return code, {check["name"]: check for check in found["checks"]}


def test_doctor_looks_at_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_TRIAL_BYTES", 1 << 20)
    for record in (1, 2):
        write(LocalStore(tmp_path / "run" / "storage"), part_of(record))
    monkeypatch.setattr(facts, "ask_status", lambda address: an_agent())
    code, by_name = looked(tmp_path / "run")
    assert code == 1
    assert by_name["agent's alarms"]["text"] == "the last checkpoint could not be written: no space left"
    assert (
        by_name["checkpoints"]["text"]
        == "2 complete ones; a resume from storage takes step 2, if its content is right (memckpt verify)"
    )
    assert by_name["room of the run"]["outcome"] == "ok"
    assert "memory of the run" not in by_name
    monkeypatch.setattr(facts, "ask_status", lambda address: None)
    assert looked(tmp_path / "run")[1]["memory of the run"]["outcome"] == "ok"


def test_doctor_examines_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_TRIAL_BYTES", 1 << 20)
    code, by_name = looked(tmp_path / "run")
    assert code == any(check["outcome"] == "problem" for check in by_name.values())
    assert set(by_name) == {
        "Python", "kernel", "agent's socket", "memory", "agent's life", "agent", "open files", "checkpoints", "torch",
        "cores", "Lightning", "accelerate", "safetensors", "s3fs", "settings", "erasure code",
        "peers' transport", "storage", "room",
    }  # fmt: skip
    assert by_name["torch"]["outcome"] == "ok"
    assert str(tmp_path) in by_name["storage"]["text"]
    assert list(tmp_path.iterdir()) == []
    assert "0 problems" in invoke("doctor", "--url", f"memory://{tmp_path.name}")[1]


def test_doctor_looks_into_an_object_store_without_a_run(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}"

    def storage() -> dict[str, str]:
        _, found = looked("--url", url)
        assert "room" not in found  # that is a disk's
        return {name: found[name]["text"] for name in ("storage", "checkpoints")}

    found = storage()
    assert found["storage"].startswith(f"{url}: an object was written, read and deleted")
    assert found["checkpoints"] == f"none in {url}"
    for record in (1, 2):
        write(open_store(url), part_of(record, run="A-1"))
    takes = "a resume from storage takes step 2, if its content is right (memckpt verify)"
    assert storage()["checkpoints"] == f"2 complete ones of the run 'A-1'; {takes}"


def test_an_empty_bucket_name_is_no_local_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, by_name = looked("--url", "s3://")
    assert code == 1
    assert by_name["storage"]["text"].startswith("storage.url: expected a bucket")
    assert "credentials" not in by_name["storage"]["remedy"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["doctor", "status", "ls", "verify", "stop"])
def test_a_url_is_no_run_directory(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=r"RUN: expected a run directory, found the URL s3://bucket/some/run"):
        invoke(command, "s3://bucket/some/run")
    (tmp_path / "s3:" / "bucket").mkdir(parents=True)
    if command == "doctor":
        assert "checkpoints" in invoke(command, "s3:/bucket")[1]  # a directory that is there


def test_a_problem_is_an_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "missing_kernel_features", lambda: ("memfd_create",))
    code, text = invoke("doctor", "--url", "quux://x")
    assert code == 1
    assert "without memfd_create" in text
    assert "quux" in text
    assert "2 problems" in text


def test_settings_that_cannot_be_are_shown_and_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMCKPT_PEERS_DATA", "4")
    code, by_name = looked(tmp_path / "run")
    assert code == 1
    assert "MEMCKPT_PEERS_DATA: expected MEMCKPT_PEERS=erasure beside it" in by_name["settings"]["text"]
    assert "storage" not in by_name


def test_warnings_are_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Check("memory", "warning", "little [of it]", "more")
    monkeypatch.setattr(facts, "examine", lambda run, url: iter([shown]))
    code, text = invoke("doctor")
    assert code == 0
    assert "little [of it]" in text
    assert "0 problems, 1 warning\n" in text


def test_quota_and_affinity_make_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(budget, "cpu_quota", lambda: 1.5)
    assert budget.usable_cores() == 1.5
    monkeypatch.setattr(budget, "cpu_quota", lambda: None)
    assert budget.usable_cores() == 4.0
