"""``memckpt doctor``: each conclusion, from facts made for the test."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest

from memckpt.config import ErasureConfig, MemckptConfig
from memckpt.session import mode as choice
from memckpt_tools.doctor import checks
from memckpt_tools.doctor import probes as facts
from memckpt_tools.doctor.checks import Check, DiskFacts, StoreFacts

GIB = 2**30
CODES = ("isa_l_rs_cauchy", "isa_l_rs_vand")
CODED, CURVE, PLAIN = ErasureConfig(data=2, tolerate=2), ErasureConfig(), ErasureConfig(security="plain")


@pytest.mark.parametrize(
    ("found", "outcome", "text"),
    [
        (checks.check_python((3, 9, 18)), "problem", "3.9.18"),
        (checks.check_python((3, 10, 0)), "ok", "3.10.0"),
        (checks.check_torch("2.6.0", ""), "ok", "2.6.0"),
        (checks.check_torch("2.13.0+cpu", ""), "ok", "2.13.0+cpu"),
        (checks.check_torch("10.0.0a0+git", ""), "ok", "10.0.0a0"),
        (checks.check_torch("2.5.1", ""), "problem", "2.5.1"),
        (checks.check_torch("2.13.0", "OSError: libtorch.so: cannot open"), "problem", "libtorch.so: cannot open"),
        (checks.check_torch(None, "ModuleNotFoundError: torch"), "problem", "not installed"),
        (checks.check_lightning("2.5.0", None), "ok", "2.5.0"),
        (checks.check_lightning("2.4.9", None), "problem", "2.4.9"),
        (checks.check_lightning(None, "2.6.0"), "warning", "only pytorch-lightning 2.6.0 is installed"),
        (checks.check_lightning(None, None), "ok", "not installed"),
        (checks.check_lightning("2.6.6", "2.6.6"), "ok", "2.6.6"),
        (checks.check_optional("accelerate", "1.0", "x"), "ok", "1.0"),
        (checks.check_optional("accelerate", None, "training with Accelerate"), "ok", "pip install accelerate"),
        (checks.check_driver("s3://bucket/x", {}), "problem", "not installed; s3://bucket/x needs it"),
        (checks.check_driver("gs://b/x", {"gcsfs": "2024.2"}), "ok", "2024.2"),
        (checks.check_erasure(CODES, "", None), "ok", "isa_l_rs_cauchy, and 1 other"),
        (checks.check_erasure(CODES, "", CODED), "ok", "isa_l_rs_cauchy"),
        (
            checks.check_erasure(CODES, "", ErasureConfig(data=2, tolerate=2, backend="shss")),
            "problem",
            "shss is not available; available: isa_l_rs_cauchy, isa_l_rs_vand",
        ),
        (checks.check_erasure((), "ImportError: liberasurecode.so", CODED), "problem", "liberasurecode.so"),
        # Copies and stripes without parity need no code.
        (checks.check_erasure((), "", ErasureConfig(data=1, tolerate=2)), "warning", "available: none"),
        (checks.check_erasure((), "", ErasureConfig(data=2, tolerate=1)), "warning", "available: none"),
        (checks.check_erasure((), "", None), "warning", "available: none"),
        (checks.check_transport("4.3.5", True, "", CURVE), "ok", "ZeroMQ 4.3.5 with CURVE"),
        (checks.check_transport("4.3.5", False, "", CURVE), "problem", "without CURVE"),
        (checks.check_transport("4.3.5", False, "", PLAIN), "warning", "without CURVE"),
        (checks.check_transport("4.3.5", False, "", None), "warning", "without CURVE"),
        (checks.check_transport("", False, "ImportError: libzmq", PLAIN), "problem", "libzmq"),
        (checks.check_transport("", False, "ImportError: libzmq", None), "warning", "libzmq"),
        (checks.check_memory(64 * GIB, None), "ok", "64.0 GiB available;"),
        (checks.check_memory(64 * GIB, None), "ok", "900M parameters (lazy)"),
        (checks.check_memory(64 * GIB, None), "ok", "1813M (snapshot)"),
        (checks.check_memory(GIB // 2, GIB), "warning", "(cgroup limit 1.0 GiB)"),
        (checks.check_kernel("6.1", ()), "ok", "6.1 with"),
        (checks.check_kernel("4.18", ("pidfd_open",)), "problem", "without pidfd_open"),
        (checks.check_sockets(""), "ok", "can be bound"),
        (checks.check_sockets("not permitted"), "problem", "not permitted"),
        (checks.check_cores(8, None, 4, False), "ok", "takes eager for one rank: training uses 4 of 8 cores"),
        (checks.check_cores(2, None, 2, False), "ok", "takes lazy for one rank: training uses all of the 2 cores"),
        (checks.check_cores(8, 1.5, 8, False), "warning", '1.5 cores (of 8, by cgroup quota); redo="auto" takes lazy'),
        (checks.check_cores(2, None, 2, True), "ok", "takes lazy for one rank: exact on an accelerator"),
        (checks.check_survival("123", None, True), "warning", "in a Slurm job"),
        (checks.check_survival(None, "train.service", False), "warning", "in train.service"),
        (checks.check_survival(None, None, True), "ok", "in a container"),
        (checks.check_survival(None, None, False), "ok", "found nothing"),
        (checks.check_agent(None, ""), "ok", "none answers"),
        (checks.check_agent(5, ""), "ok", "pid 5 answers"),
        (checks.check_agent(None, "another version"), "problem", "another version"),
        (checks.check_advice("", ""), "ok", ""),
        (checks.check_advice("slots=6", "training waits"), "warning", "training waits"),
        (checks.check_alarms(()), "ok", "none"),
        (checks.check_alarms(("disk full", "x")), "problem", "disk full; x"),
        (checks.check_settings(""), "ok", "valid"),
        (checks.check_settings("MEMCKPT_SLOTS: no"), "problem", "MEMCKPT_SLOTS: no"),
        (checks.check_descriptors(256, None, 5000, CURVE), "ok", "unlimited"),
        # 1,024 - 128 - 4 for the lanes of a group of three make three for each of 297 others.
        (checks.check_descriptors(256, 1024, 298, CURVE), "ok", ""),
        (checks.check_descriptors(256, 1024, 299, CURVE), "problem", "this job has 299"),
        (checks.check_descriptors(256, 512, 1, CURVE), "warning", ""),
        (checks.check_descriptors(256, 512, 1, None), "ok", ""),
        (checks.check_descriptors(256, 64, 2, None), "problem", "this job has 2"),
        (checks.check_content(StoreFacts("/s")), "ok", "none in /s"),
        (checks.check_content(StoreFacts("/s", checkpoints=2, step=7)), "ok", "takes step 7"),
        (
            checks.check_content(StoreFacts("/s", checkpoints=1, step=7, wrong=("cut short", "x"))),
            "warning",
            "cut short (and 1 more)",
        ),
        (checks.check_content(StoreFacts("/s", problem="not mounted")), "problem", "not mounted"),
        (checks.check_content(StoreFacts("/s", foreign="another's")), "problem", "another's"),
        (checks.check_other_runs(StoreFacts("/s", beside=("B",))), "ok", "beside this one: B"),
        (checks.check_other_runs(StoreFacts("/s", others=("C",))), "warning", "/s also has files of C"),
        (checks.check_store("s3://b", 0.1, ""), "ok", "s3://b"),
        (checks.check_store("s3://b", 0, "denied"), "problem", "denied"),
    ],
)
def test_a_conclusion(found: Check | None, outcome: str, text: str) -> None:
    assert outcomes(found) == [outcome]  # a remedy unless it is ok
    assert text in found.text


def test_remedies_are_the_commands_to_type() -> None:
    missing = checks.check_driver("s3://bucket/x", {})
    assert missing.remedy == "pip install s3fs"
    assert checks.check_cores(8, 1.5, 8, False).remedy == "OMP_NUM_THREADS=1"
    assert "slots=6" in checks.check_advice("slots=6", "training waits").remedy
    assert checks.check_driver("/runs/one", {}) is None
    assert checks.check_driver("memory://x", {}) is None


def test_peers_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert facts.configured_peers() == (None, "")
    monkeypatch.setenv("MEMCKPT_PEERS", "erasure")
    assert facts.configured_peers() == (ErasureConfig(), "")
    monkeypatch.setenv("MEMCKPT_PEERS_DATA", "0")
    assert "MEMCKPT_PEERS_DATA" in facts.configured_peers()[1]


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_the_redo_mode_is_the_one_that_a_session_would_choose(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule is written down twice, as the command line must not import the session."""
    import torch

    class Live:
        optimizers = (torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1),)
        not_redoable = MappingProxyType({})

        def tensors(self) -> dict[str, torch.Tensor]:
            return {}

    live: Any = Live()
    monkeypatch.setattr(choice, "usable_cores", lambda: 3.0)
    monkeypatch.setattr(choice, "_SMALL_WINDOW_BYTES", -1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    chosen = choice.choose_redo(MemckptConfig(), live, torch.device("cpu"), 1)
    assert checks.expected_redo(3.0, threads, on_accelerator=False) == chosen
    chosen = choice.choose_redo(MemckptConfig(), live, torch.device("cuda"), 1)
    assert checks.expected_redo(3.0, threads, on_accelerator=True) == chosen


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
    assert outcomes(*checks.check_disk(disk)) == expected


@pytest.mark.parametrize(
    ("gib", "free", "available", "expected"),
    [
        (10, 40, None, ["ok"]),
        (10, 20, None, ["warning"]),
        (10, 9, None, ["problem"]),
        (10, 40, 100, ["ok", "ok"]),
        (10, 40, 12, ["ok", "warning"]),
        (10, None, None, []),
    ],
)
def test_the_room_of_this_very_run(gib: int, free: int | None, available: int | None, expected: list[str]) -> None:
    disk = None if free is None else DiskFacts("/s", "ext4", free * GIB, 1e9)
    assert outcomes(*checks.check_room(gib * GIB, disk, available and available * GIB)) == expected


def outcomes(*found: Check) -> list[str]:
    """Their outcomes; whatever is not well has a remedy, and only that."""
    for check in found:
        assert bool(check.remedy) == (check.outcome != "ok"), check
    return [check.outcome for check in found]
