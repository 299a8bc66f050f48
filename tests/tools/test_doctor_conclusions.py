"""``memckpt doctor``: each conclusion, from facts made for the test."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest

from memckpt.config import ErasureConfig, MemckptConfig
from memckpt.session import mode as choice
from memckpt_tools.doctor import checks
from memckpt_tools.doctor import probes as facts
from memckpt_tools.doctor.checks import DiskFacts
from tests.support.monitoring.checks import outcomes

GIB = 2**30


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
    assert checks.check_driver("/runs/one", {}) is None
    assert checks.check_driver("memory://x", {}) is None
    missing, there = (
        checks.check_driver("s3://bucket/x", {}),
        checks.check_driver("gs://b/x", {"gcsfs": "2024.2"}),
    )
    assert missing is not None
    assert there is not None
    assert outcomes(missing, there) == ["problem", "ok"]
    assert missing.remedy == "pip install s3fs"


def test_settings_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcomes(checks.check_settings(""), checks.check_settings("MEMCKPT_SLOTS: no")) == ["ok", "problem"]
    assert facts.configured_peers() == (None, "")
    monkeypatch.setenv("MEMCKPT_PEERS", "erasure")
    assert facts.configured_peers() == (ErasureConfig(), "")
    monkeypatch.setenv("MEMCKPT_PEERS_DATA", "0")
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
        checks.check_erasure((), "", None),
    ]
    assert outcomes(*found) == ["ok", "ok", "problem", "problem", "warning", "warning", "warning"]
    assert found[0].text == "isa_l_rs_cauchy, and 1 other"
    assert found[2].text == "shss is not available; available: isa_l_rs_cauchy, isa_l_rs_vand"
    assert "liberasurecode.so" in found[3].text


def test_the_transport_of_peers() -> None:
    curve, plain = ErasureConfig(), ErasureConfig(security="plain")
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
    assert "1813M (snapshot)" in plenty.text


def test_bytes_per_parameter_are_those_of_the_documentation() -> None:
    """docs/configuration.md#memory: base and log, and 12 while a checkpoint is on its way to storage."""
    assert round(checks.bytes_per_parameter("eager"), 1) == 25.1 + 12
    assert round(checks.bytes_per_parameter("lazy"), 1) == 60.5 + 12
    assert checks.bytes_per_parameter("snapshot") == 24 + 12


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
        optimizers = (torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1),)
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
    assert outcomes(*checks.check_disk(disk)) == expected


def test_store() -> None:
    assert outcomes(checks.check_store("s3://b", 0.1, ""), checks.check_store("s3://b", 0, "denied")) == [
        "ok",
        "problem",
    ]
