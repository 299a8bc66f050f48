"""``memckpt doctor``: each conclusion from facts made for the test; the facts on the machine that runs it."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import socket
import sys
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from memckpt.cli import checks, doctor, storage_checks
from memckpt.cli import probes as facts
from memckpt.cli.checks import Check
from memckpt.cli.storage_checks import DiskFacts, StoreFacts
from memckpt.config import ErasureConfig, MemckptConfig, MirrorConfig
from memckpt.errors import AgentError, ConfigurationError
from memckpt.memory import cgroup
from memckpt.processes.address import AgentAddress
from memckpt.session import policy as choice
from memckpt.storage.local_store import LocalStore
from memckpt.storage.owner import keep_run
from memckpt.storage.urls import open_store
from memckpt.user_messages import short_number
from tests.cli.test_cli_status import an_agent, some_peers
from tests.storage.test_storage import part_of, write
from tests.support.trainings.cli_harness import invoke, invoke_json

GIB = 2**30


def outcomes(*found: Check) -> list[str]:
    """Their outcomes; whatever is not well has a remedy, and only that."""
    for check in found:
        assert bool(check.remedy) == (check.outcome != "ok"), check
    return [check.outcome for check in found]


# Conclusions


def test_python() -> None:
    assert outcomes(checks.check_python((3, 9, 18)), checks.check_python((3, 10, 0))) == ["problem", "ok"]


@pytest.mark.parametrize(
    ("version", "import_error", "outcome"),
    [
        ("2.6.0", "", "ok"),
        ("2.13.0+cpu", "", "ok"),
        ("10.0.0a0+git", "", "ok"),
        ("2.5.1", "", "problem"),
        ("2.13.0", "OSError: libtorch.so: cannot open", "problem"),
        (None, "ModuleNotFoundError: torch", "problem"),
    ],
)
def test_torch(version: str | None, import_error: str, outcome: str) -> None:
    assert outcomes(checks.check_torch(version, import_error)) == [outcome]


@pytest.mark.parametrize(
    ("version", "old_name", "outcome"),
    [
        ("2.5.0", None, "ok"),
        ("2.4.9", None, "problem"),
        (None, "2.6.0", "warning"),
        (None, None, "ok"),
        ("2.6.6", "2.6.6", "ok"),
    ],
)
def test_lightning(version: str | None, old_name: str | None, outcome: str) -> None:
    assert outcomes(checks.check_lightning(version, old_name)) == [outcome]


def test_optional_packages() -> None:
    assert checks.check_optional("accelerate", "1.0", "x").text == "1.0"
    absent = checks.check_optional("accelerate", None, "training with Accelerate")
    assert absent.outcome == "ok"
    assert "pip install accelerate" in absent.text


def test_the_driver_of_an_object_store() -> None:
    assert storage_checks.check_driver("/runs/one", {}) is None
    assert storage_checks.check_driver("memory://x", {}) is None
    missing, there = (
        storage_checks.check_driver("s3://bucket/x", {}),
        storage_checks.check_driver("gs://b/x", {"gcsfs": "2024.2"}),
    )
    assert missing is not None
    assert there is not None
    assert outcomes(missing, there) == ["problem", "ok"]
    assert missing.remedy == "pip install s3fs"


def test_settings_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcomes(checks.check_settings(""), checks.check_settings("MEMCKPT_SLOTS: no")) == ["ok", "problem"]
    assert facts.configured_peers() == (None, "")
    monkeypatch.setenv("MEMCKPT_PEERS", "mirror")
    assert facts.configured_peers() == (MirrorConfig(), "")
    monkeypatch.setenv("MEMCKPT_PEERS_DATA", "4")
    assert "MEMCKPT_PEERS_DATA" in facts.configured_peers()[1]


def test_the_erasure_code() -> None:
    there = ("isa_l_rs_cauchy", "isa_l_rs_vand")
    default, other = ErasureConfig(data=2, tolerate=2), ErasureConfig(data=2, tolerate=2, backend="shss")
    found = [
        checks.check_erasure(there, "", None),
        checks.check_erasure(there, "", default),
        checks.check_erasure(there, "", other),
        checks.check_erasure((), "ImportError: liberasurecode.so", default),
        # Copies and stripes without parity need no code.
        checks.check_erasure((), "", ErasureConfig(data=1, tolerate=2)),
        checks.check_erasure((), "", ErasureConfig(data=2, tolerate=1)),
        checks.check_erasure((), "", MirrorConfig()),
        checks.check_erasure((), "", None),
    ]
    assert outcomes(*found) == ["ok", "ok", "problem", "problem", "warning", "warning", "warning", "warning"]
    assert found[0].text == "isa_l_rs_cauchy, and 1 other"
    assert found[2].text == "shss is not available; available: isa_l_rs_cauchy, isa_l_rs_vand"
    assert "liberasurecode.so" in found[3].text


def test_the_transport_of_peers() -> None:
    curve, plain = MirrorConfig(), MirrorConfig(security="plain")
    found = [
        checks.check_transport("4.3.5", True, "", curve),
        checks.check_transport("4.3.5", False, "", curve),
        checks.check_transport("4.3.5", False, "", plain),
        checks.check_transport("4.3.5", False, "", None),
        checks.check_transport("", False, "ImportError: libzmq", plain),
        checks.check_transport("", False, "ImportError: libzmq", None),
    ]
    assert outcomes(*found) == ["ok", "problem", "warning", "warning", "problem", "warning"]
    assert found[0].text == "ZeroMQ 4.3.5 with CURVE"


def test_memory() -> None:
    plenty, little = checks.check_memory(64 * GIB, None), checks.check_memory(GIB // 2, GIB)
    assert outcomes(plenty, little) == ["ok", "warning"]
    assert "64.0 GiB available;" in plenty.text
    assert "(cgroup limit 1.0 GiB)" in little.text
    assert "900M parameters (lazy)" in plenty.text
    assert "1813M (capture)" in plenty.text


def test_bytes_per_parameter_are_those_of_the_documentation() -> None:
    """docs/configuration.md#memory: base and log, and 12 while a checkpoint is on its way to storage."""
    assert round(checks.bytes_per_parameter("eager"), 1) == 25.1 + 12
    assert round(checks.bytes_per_parameter("lazy"), 1) == 60.5 + 12
    assert checks.bytes_per_parameter("capture") == 24 + 12


def test_locked_memory_matters_with_cuda_only() -> None:
    found = [checks.check_locked_memory(*each) for each in [(None, True), (8 << 20, False), (8 << 20, True)]]
    assert outcomes(*found) == ["ok", "ok", "warning"]


def test_kernel() -> None:
    assert outcomes(checks.check_kernel("6.1", ()), checks.check_kernel("4.18", ("pidfd_open",))) == ["ok", "problem"]


def test_sockets() -> None:
    assert outcomes(checks.check_sockets(""), checks.check_sockets("not permitted")) == ["ok", "problem"]


@pytest.mark.parametrize(
    ("affinity", "quota", "threads", "cuda", "outcome", "text"),
    [
        (8, None, 4, False, "ok", '8 cores; redo="auto" takes eager for one rank: training uses 4 of 8 cores'),
        (2, None, 2, False, "ok", "takes lazy for one rank: training uses all of the 2 cores"),
        (8, 1.5, 8, False, "warning", '1.5 cores (of 8, by cgroup quota); redo="auto" takes lazy'),
        (2, None, 2, True, "ok", "takes lazy for one rank: exact on an accelerator"),
    ],
)
def test_cores(affinity: int, quota: float | None, threads: int, cuda: bool, outcome: str, text: str) -> None:
    found = checks.check_cores(affinity, quota, threads, cuda)
    assert outcomes(found) == [outcome]
    assert text in found.text
    if outcome == "warning":
        assert found.remedy == "OMP_NUM_THREADS=1"


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_the_redo_mode_is_the_one_that_a_session_would_choose(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule is written down twice, as the command line must not import the session."""
    import torch

    class Live:
        optimizers = ()
        not_redoable = MappingProxyType({})

        def tensors(self) -> dict[str, torch.Tensor]:
            return {}

    live: Any = Live()
    monkeypatch.setattr(choice, "usable_cores", lambda: 3.0)
    monkeypatch.setattr(choice, "_SMALL_WINDOW_BYTES", -1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    chosen = choice.choose_redo(MemckptConfig(), live, torch.device("cpu"), 1)
    assert checks.expected_redo(3.0, threads, cuda=False) == chosen
    chosen = choice.choose_redo(MemckptConfig(), live, torch.device("cuda"), 1)
    assert checks.expected_redo(3.0, threads, cuda=True) == chosen


def test_who_ends_the_agent_with_the_trainer() -> None:
    found = [
        checks.check_survival("123", None, True),
        checks.check_survival(None, "train.service", False),
        checks.check_survival(None, None, True),
        checks.check_survival(None, None, False),
    ]
    assert outcomes(*found) == ["warning", "warning", "ok", "ok"]


def test_agent() -> None:
    found = [checks.check_agent(None, ""), checks.check_agent(5, ""), checks.check_agent(None, "another version")]
    assert outcomes(*found) == ["ok", "ok", "problem"]


@pytest.mark.parametrize(
    ("disk", "expected"),
    [
        (DiskFacts("/runs", "ext4", 100 * GIB, 500e6), ["ok", "ok"]),
        (DiskFacts("/runs", "ext4", 100 * GIB, 5e6), ["warning", "ok"]),
        (DiskFacts("/dev/shm", "tmpfs", 100 * GIB, 5e9), ["warning", "ok"]),
        (DiskFacts("/", "overlay", 100 * GIB, 5e8), ["warning", "ok"]),
        (DiskFacts("/runs", "nfs4", GIB, 500e6), ["ok", "warning"]),
        (DiskFacts("/runs", "nfs4", GIB, None, "Read-only file system"), ["problem", "warning"]),
        (DiskFacts("/runs", "ext4", 8 << 20, None), ["ok", "warning"]),
        (DiskFacts("/runs", "tmpfs", 8 << 20, None), ["warning", "warning"]),
    ],
)
def test_disk(disk: DiskFacts, expected: list[str]) -> None:
    assert outcomes(*storage_checks.check_disk(disk)) == expected


def test_store() -> None:
    assert outcomes(
        storage_checks.check_store("s3://b", 0.1, ""), storage_checks.check_store("s3://b", 0, "denied")
    ) == [
        "ok",
        "problem",
    ]


# Facts


def test_versions_are_read_without_an_import() -> None:
    assert facts.installed_version("torch")
    assert facts.installed_version("no-such-distribution") is None


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
    said = storage_checks.check_disk(found)[0].text
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


def test_alarms_of_the_agent() -> None:
    assert outcomes(checks.check_alarms(()), checks.check_alarms(("disk full", "x"))) == ["ok", "problem"]
    assert checks.check_alarms(("disk full", "x")).text == "disk full; x"


@pytest.mark.parametrize(
    ("hard", "nodes", "peers", "outcome"),
    [
        (None, 5000, ErasureConfig(), "ok"),
        (1024, 299, ErasureConfig(), "ok"),  # 1,024 - 128 make three for each of 298 others
        (1024, 300, ErasureConfig(), "problem"),
        (512, 1, ErasureConfig(), "warning"),
        (512, 1, None, "ok"),
        (64, 2, None, "problem"),
    ],
)
def test_descriptors(hard: int | None, nodes: int, peers: ErasureConfig | None, outcome: str) -> None:
    assert outcomes(checks.check_descriptors(256, hard, nodes, peers)) == [outcome]


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


def test_the_content_of_a_store() -> None:
    assert outcomes(
        storage_checks.check_content(StoreFacts("/s")),
        storage_checks.check_content(StoreFacts("/s", checkpoints=2, step=7)),
        storage_checks.check_content(StoreFacts("/s", checkpoints=1, step=7, wrong=("cut short", "x"))),
        storage_checks.check_content(StoreFacts("/s", problem="not mounted")),
        storage_checks.check_content(StoreFacts("/s", foreign="another's")),
    ) == ["ok", "ok", "warning", "problem", "problem"]
    assert outcomes(
        storage_checks.check_other_runs(StoreFacts("/s", beside=("B",))),
        storage_checks.check_other_runs(StoreFacts("/s", others=("C",))),
    ) == ["ok", "warning"]


def test_the_room_of_this_very_run() -> None:
    def outcome(nbytes: int, free: int, available: int | None = None) -> list[str]:
        return outcomes(*storage_checks.check_room(nbytes, DiskFacts("/s", "ext4", free, 1e9), available))

    assert outcome(10 * GIB, 40 * GIB) == ["ok"]
    assert outcome(10 * GIB, 20 * GIB) == ["warning"]
    assert outcome(10 * GIB, 9 * GIB) == ["problem"]
    assert outcome(10 * GIB, 40 * GIB, 100 * GIB) == ["ok", "ok"]
    assert outcome(10 * GIB, 40 * GIB, 12 * GIB) == ["ok", "warning"]
    assert outcomes(*storage_checks.check_room(10 * GIB, None, None)) == []


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


def test_doctor_looks_at_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_TRIAL_BYTES", 1 << 20)
    for record in (1, 2):
        write(LocalStore(tmp_path / "run" / "storage"), part_of(record))
    monkeypatch.setattr(facts, "ask_status", lambda address: an_agent())
    code, found = invoke_json("doctor", tmp_path / "run")
    assert code == 1
    by_name = {check["name"]: check for check in found["checks"]}
    assert by_name["agent's alarms"]["text"] == "the last checkpoint could not be written: no space left"
    assert by_name["checkpoints"]["text"] == "2 whole ones; a resume from storage finds step 2"
    assert by_name["room of the run"]["outcome"] == "ok"
    assert "memory of the run" not in by_name
    monkeypatch.setattr(facts, "ask_status", lambda address: None)
    by_name = {check["name"]: check for check in invoke_json("doctor", tmp_path / "run")[1]["checks"]}
    assert by_name["memory of the run"]["outcome"] == "ok"


def test_doctor_examines_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_TRIAL_BYTES", 1 << 20)
    code, found = invoke_json("doctor", tmp_path / "run")
    assert code == (1 if found["problems"] else 0)
    by_name = {check["name"]: check for check in found["checks"]}
    assert set(by_name) == {
        "Python",
        "kernel",
        "agent's socket",
        "memory",
        "agent's life",
        "agent",
        "open files",
        "checkpoints",
        "torch",
        "cores",
        "locked memory",
        "Lightning",
        "accelerate",
        "safetensors",
        "s3fs",
        "settings",
        "erasure code",
        "peers' transport",
        "storage",
        "room",
    }
    assert by_name["torch"]["outcome"] == "ok"
    assert str(tmp_path) in by_name["storage"]["text"]
    assert list(tmp_path.iterdir()) == []
    assert "0 problems" in invoke("doctor", "--url", f"memory://{tmp_path.name}")[1]


def test_doctor_looks_into_an_object_store_without_a_run(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}"

    def storage() -> dict[str, str]:
        found = {check["name"]: check for check in invoke_json("doctor", "--url", url)[1]["checks"]}
        assert "room" not in found  # that is a disk's
        return {name: found[name]["text"] for name in ("storage", "checkpoints")}

    found = storage()
    assert found["storage"].startswith(f"{url}: an object was written, read and deleted")
    assert found["checkpoints"] == f"none in {url}"
    for record in (1, 2):
        write(open_store(url), part_of(record, run="A-1"))
    assert storage()["checkpoints"] == "2 whole ones of the run 'A-1'; a resume from storage finds step 2"


def test_an_empty_bucket_name_is_no_local_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, found = invoke_json("doctor", "--url", "s3://")
    by_name = {check["name"]: check for check in found["checks"]}
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
    code, found = invoke_json("doctor", tmp_path / "run")
    assert code == 1
    by_name = {check["name"]: check for check in found["checks"]}
    assert "MEMCKPT_PEERS_DATA: expected MEMCKPT_PEERS=erasure beside it" in by_name["settings"]["text"]
    assert "storage" not in by_name


def test_warnings_are_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Check("memory", "warning", "little [of it]", "more")
    monkeypatch.setattr(doctor, "examine", lambda run, url: iter([shown]))
    code, text = invoke("doctor")
    assert code == 0
    assert "little [of it]" in text
    assert "0 problems, 1 warning\n" in text


def test_quota_and_affinity_make_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(cgroup, "cpu_quota", lambda: 1.5)
    assert cgroup.usable_cores() == 1.5
    monkeypatch.setattr(cgroup, "cpu_quota", lambda: None)
    assert cgroup.usable_cores() == 4.0


@pytest.mark.parametrize(("number", "text"), [(41, "41"), (8_320, "8.3K"), (999_999, "1000.0K"), (3_200_000, "3.2M")])
def test_counts_in_short(number: int, text: str) -> None:
    assert short_number(number) == text
