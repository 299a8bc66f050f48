"""Nothing waits for the device in a step, and what is copied beside it is what it was."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from memckpt.capture import slot_writer
from memckpt.session import tuning
from tests.gpu.unsynchronized import STOPS, Kind, train
from tests.support.late import device as late
from tests.support.trainings.engine_harness import Lab

KINDS = {
    "fp32": Kind(),
    "fp32-fused": Kind(optimizer={"fused": True}, clip=True),
    "fp32-foreach": Kind(optimizer={"foreach": True}, zero_in_place=True),
    "nesterov": Kind(optimizer={"momentum": 0.9, "nesterov": True, "foreach": True}),
    "bf16": Kind("bf16", {"fused": True}),
    "fp16-fused": Kind("fp16", {"fused": True}),
    "fp16-clip": Kind("fp16", clip=True),
    "accumulated": Kind(accumulate=3, clip=True),
    "step-tap": Kind(tap="step", zero_in_place=True),
    "own-stream": Kind(own_stream=True),
    "own-stream-fused": Kind(optimizer={"fused": True}, clip=True, own_stream=True),
    "swapped": Kind(swapped=True),
    "averaged": Kind(averaged=True),
    "masked": Kind(masked=True),
}
#: Their own step waits for the device: torch asks whether gradients are finite before it steps.
WAITS = {"fp16-clip"}


def result_of(
    gpu_lab: Lab, name: str, redo: str, device: str, prepare: Callable[[], object] = lambda: None, watch: bool = True
) -> dict[str, Any]:
    report = gpu_lab.directory / "result"
    width = 3072 if device == "cuda" else 64
    watch = watch and name not in WAITS

    def body() -> None:
        prepare()
        train(KINDS[name], device, width, gpu_lab.run_dir, redo, watch, report)

    child = gpu_lab.fork(body, name)
    code, log = child.wait(), child.log.read_text()
    assert code == 0, log[:4000] + "..." + log[-4000:]
    assert "commit could not be made" not in log
    found: dict[str, Any] = {**json.loads(report.read_text()), "log": log}
    return found


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", KINDS)
def test_bits_without_a_wait(gpu_lab: Lab, device: str, name: str) -> None:
    found = result_of(gpu_lab, name, "lazy", device)
    assert found["problems"] == []
    assert found["resumed"] == [0, *STOPS[:-1]]
    assert found["differing"] == []
    assert found["kept"] == 0  # bytes that were freed, and that no step may use before a copy has ended


@pytest.mark.usefixtures("only_late")  # another one page-locks as it likes
@pytest.mark.parametrize(("seconds", "most_bytes"), [(0.05, 1 << 40), (0.0, 1)], ids=["slow", "refused"])
def test_page_locking_that_is_slow_or_refused(gpu_lab: Lab, device: str, seconds: float, most_bytes: int) -> None:
    """What is not page-locked is copied to all the same, and waited for."""

    def prepare() -> None:
        late.limit_page_locking(seconds, most_bytes)
        slot_writer.LOCKED_BYTES = 1 << 12

    found = result_of(gpu_lab, "fp32", "lazy", device, prepare, watch=False)
    assert found["problems"] == []
    assert found["resumed"] == [0, *STOPS[:-1]]
    assert found["differing"] == []
    assert found["log"].count("could not be page-locked: cudaHostRegister failed with error 2") == (most_bytes == 1)


@pytest.mark.usefixtures("only_late")  # a second card is rare
def test_a_model_on_a_device_that_is_not_the_current_one(gpu_lab: Lab) -> None:
    """What acts on the current device is told the model's: it would open a context on another card, or ask that one."""

    def prepare() -> None:
        late.load()
        module: Any = torch.get_device_module("late")
        register = module.cudart.cudaHostRegister

        def note(what: str, result: Any = None) -> Any:
            print(f"{what} on device {module.current_device()}", flush=True)
            return result

        module.cudart.cudaHostRegister = staticmethod(lambda *given: note("page-locked", register(*given)))
        module.is_current_stream_capturing = lambda: note("asked for graphs", False)

    found = result_of(gpu_lab, "fp32", "lazy", "late:1", prepare)
    assert found["problems"] == []
    assert found["resumed"] == [0, *STOPS[:-1]]
    assert found["differing"] == []
    noted = set(re.findall(r"(page-locked|asked for graphs) on device (\d)", found["log"]))
    assert noted == {("page-locked", "1"), ("asked for graphs", "1")}


def test_copies_are_timed_once_and_told(gpu_lab: Lab, device: str) -> None:
    """Without a wait of the host; on a CPU there is nothing to tell."""

    def prepare() -> None:
        tuning.FIRST_RECORDS, tuning.LEAST_RECORDS, tuning.LOOK_SECONDS, tuning._TIMED_RECORDS = 1, 3, 0.0, 1

    found = result_of(gpu_lab, "fp32-fused", "lazy", device, prepare)
    assert found["differing"] == []
    assert "advice on settings ends" not in found["log"]
    told = re.findall(r"copies to the host take (\S+) ms of a step of (\S+) s, at (\S+) GB/s; (\d+)% of", found["log"])
    if device == "cpu":
        assert told == []
    else:
        assert told
        assert all(float(number) > 0 for _, step, rate, _ in told for number in (step, rate))


@pytest.mark.promise("CUDA")
def test_drift_of_a_replica_on_the_cpu(gpu_lab: Lab, device: str) -> None:
    """Eager: exact where the replica is redone by the kernels that train, and off by rounding elsewhere."""
    gpu_lab.start_agent()
    found = result_of(gpu_lab, "fp32-fused", "eager", device)
    assert found["resumed"] == [0, *STOPS[:-1]]
    print(f"drift: {found['drift']:g} ulp; largest relative distance: {max(found['far'].values()):.2g}")
    if device == "cpu":
        assert found["differing"] == []
        assert found["drift"] == 0.0
    else:
        assert max(found["far"].values()) < 1e-2
    assert "the audit found" not in found["log"], "rounding is no finding"
