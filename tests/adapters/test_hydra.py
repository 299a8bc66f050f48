"""Hydra: what composes, what is refused, and a real application that is killed and resumed."""

from __future__ import annotations

import dataclasses
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memckpt.config import (
    AgentConfig,
    ErasureConfig,
    HalfPrecision,
    MemckptConfig,
    PowerSGD,
    Quantized8,
    RandomK,
    StorageConfig,
    TopK,
)
from memckpt.errors import ConfigurationError
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.hydra_settings import compose
from tests.support.trainings.script_runs import ROOT, Scripts, last_words

hydra = pytest.importorskip("hydra")


@pytest.fixture(scope="session")
def _imported() -> None:
    import torchmetrics  # noqa: F401


@pytest.fixture
def scripts(_imported: None, lab: Lab) -> Iterator[Scripts]:
    return Scripts(lab)


def protection(*overrides: str) -> Any:
    from memckpt_hydra import protection

    return protection(compose(*overrides))


def test_default_is_what_the_dataclasses_say() -> None:
    assert protection("+memckpt=default") == ("somewhere", "auto", MemckptConfig())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("local_only", {"storage": None}),
        (
            "durable",
            {
                "agent": AgentConfig(linger_seconds=14400),
                "storage": StorageConfig(min_seconds=30, overhead=0.03, keep_last=3, grace_seconds=60),
            },
        ),
        ("exact_cuda", {"redo": "lazy", "anchor_period_steps": 8}),
        ("low_memory", {"redo": "eager", "anchor_period_steps": 32, "slots": 3}),
    ],
)
def test_each_option_of_the_group(name: str, expected: dict[str, Any]) -> None:
    assert protection(f"+memckpt={name}").config == MemckptConfig(**expected)


def test_every_setting_can_be_overridden() -> None:
    overrides = ["redo=lazy", "tap=step", "anchor_period_steps=5", "slots=4", "agent.threads=2", "storage.url=s3://b/r"]
    found = protection("+memckpt=default", *(f"memckpt.{each}" for each in overrides), "+resume=17")
    assert found.resume == 17
    assert found.config == MemckptConfig(
        redo="lazy",
        tap="step",
        anchor_period_steps=5,
        slots=4,
        agent=AgentConfig(threads=2),
        storage=StorageConfig(url="s3://b/r"),
    )
    assert protection("+memckpt=default", "memckpt.storage=null").config.storage is None
    assert protection("+memckpt=default", "memckpt.override=[lr,betas]").config.override == ("lr", "betas")


@pytest.mark.thinned(4)
@pytest.mark.parametrize("base", ["default", "durable", "exact_cuda", "local_only", "low_memory"])
def test_peers_are_a_group_within_each_option(base: str) -> None:
    def peers(*overrides: str) -> Any:
        return protection(f"+memckpt={base}", *overrides).config.peers

    assert peers() is None
    assert peers("memckpt/peers=none") is None
    assert peers("memckpt/peers=erasure") == ErasureConfig()
    assert peers("memckpt/peers=erasure", "memckpt.peers.data=3", "memckpt.peers.ack=proceed") == ErasureConfig(
        data=3, ack="proceed"
    )
    assert peers("memckpt/peers=erasure", "memckpt.peers=null") is None


@pytest.mark.parametrize("base", ["default", "durable", "exact_cuda", "local_only", "low_memory"])
def test_compression_is_a_group_within_each_option(base: str) -> None:
    def compression(*overrides: str) -> Any:
        return protection(f"+memckpt={base}", *overrides).config.compression

    assert compression("memckpt/compression=topk", "memckpt.compression.ratio=0.02") == TopK(ratio=0.02)
    if base != "default":
        return
    assert compression() is None
    assert compression("memckpt/compression=none") is None
    assert compression("memckpt/compression=topk", "memckpt.compression=null") is None
    # As a file has it, without the group.
    assert compression("memckpt.compression={kind: powersgd, rank: 2}") == PowerSGD(rank=2)


def test_every_compressor_is_in_the_group() -> None:
    for kind in (TopK, RandomK, Quantized8, PowerSGD, HalfPrecision):
        composed = compose("+memckpt=default", f"memckpt/compression={kind.__name__.lower()}").memckpt.compression
        assert list(composed) == ["kind", *(each.name for each in dataclasses.fields(kind))]
        overrides = (
            ("memckpt.compression.dtype=fp16",) if kind is HalfPrecision else ("memckpt.compression.residual=drop",)
        )
        found = protection("+memckpt=default", f"memckpt/compression={kind.__name__.lower()}", *overrides)
        expected: Any = {"dtype": "fp16"} if kind is HalfPrecision else {"residual": "drop"}
        assert found.config == MemckptConfig(compression=kind(**expected))


@pytest.mark.promise(
    "Hydra: a wrong key or value is an error when composed; a killed run is found again; jobs of a sweep keep apart"
)
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["memckpt.compression.ratio=0.1"], "Could not override 'memckpt.compression.ratio'"),
        (
            ["memckpt/compression=topk", "memckpt.compression.rank=2"],
            "Key 'rank' not in 'TopK: one of min_elements, error_feedback, residual, ratio'",
        ),
        (
            ["memckpt/compression=topk", "memckpt.compression.residual=forget"],
            "Invalid value 'forget', expected one of [auto, keep, drop]",
        ),
        (["memckpt/compression=gzip"], "Could not find 'memckpt/compression/gzip'"),
        (["memckpt.peers.data=4"], "Could not override 'memckpt.peers.data'"),
        (
            ["memckpt/peers=erasure", "memckpt.peers.copies=4"],
            "Key 'copies' not in 'ErasureConfig: one of data, tolerate, backend,",
        ),
        (
            ["memckpt/peers=erasure", "memckpt.peers.ack=later"],
            "Invalid value 'later', expected one of [wait, proceed]",
        ),
        (
            ["memckpt/peers=raid"],
            "Could not find 'memckpt/peers/raid'\n\nAvailable options in 'memckpt/peers':\n\terasure\n\tnone",
        ),
        (["memckpt.slotz=1"], "Key 'slotz' not in 'MemckptConfig: one of redo, tap, anchor_period_steps, slots,"),
        (["memckpt.storage.keep=1"], "Key 'keep' not in 'StorageConfig: one of url, mode, every_steps, min_seconds,"),
        (["memckpt.redo=often"], "Invalid value 'often', expected one of [auto, eager, lazy, snapshot]"),
        (["memckpt.slots=many"], "Value 'many' of type 'str' could not be converted to Integer"),
    ],
)
def test_a_wrong_key_or_value_is_an_error_when_it_is_composed(overrides: list[str], message: str) -> None:
    with pytest.raises(hydra.errors.HydraException) as caught:
        compose("+memckpt=default", *overrides)
    assert message in f"{caught.value}\n{caught.value.__cause__}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["+memckpt=default", "memckpt.peers=erasure"], "peers: expected a mapping, found 'erasure'; write {kind"),
        (["+memckpt=default", "memckpt.slots=1"], "slots: expected a whole number, 2 to 64, or None, found 1"),
        (
            ["+memckpt=default", "+resume=latest"],
            "resume: expected 'auto', 'require', 'exact', 'never' or a step number",
        ),
        ([], "expected the group memckpt in the configuration, found none"),
    ],
)
def test_what_composes_and_cannot_be_is_an_error_of_ours(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        protection(*overrides)


def test_a_configuration_can_be_sent_to_another_process() -> None:
    found = compose("+memckpt=durable", "memckpt/peers=erasure", "memckpt.redo=lazy")
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).memckpt)"
    there = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, input=pickle.dumps(found), capture_output=True, timeout=60
    )
    assert there.returncode == 0, there.stderr.decode()
    assert there.stdout.decode().strip() == str(found.memckpt)


def test_the_tree_has_every_field_of_the_dataclasses() -> None:
    found = compose("+memckpt=default").memckpt
    for part, kind in ((found, MemckptConfig), (found.agent, AgentConfig), (found.storage, StorageConfig)):
        assert list(part) == [each.name for each in dataclasses.fields(kind)]
    peers = compose("+memckpt=default", "memckpt/peers=erasure").memckpt.peers
    assert list(peers) == ["kind", *(each.name for each in dataclasses.fields(ErasureConfig))]


@pytest.mark.parametrize("experiment", sorted(each.stem for each in ROOT.glob("conf/experiment/*.yaml")))
@pytest.mark.parametrize("trainer", ["cpu", "gpu", "ddp"])
def test_every_experiment_composes(experiment: str, trainer: str) -> None:
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "conf")):
        found = hydra.compose("config", [f"experiment={experiment}", f"trainer={trainer}"], return_hydra_config=True)
    assert found.memckpt.slots is None
    assert "${now" not in str(found.hydra.run.dir)
    assert found.hydra.run.dir == f"runs/{experiment}"


COMMON = ("memckpt=local_only", "memckpt.redo=lazy", "memckpt.agent.linger_seconds=60")


@pytest.mark.promise(
    "Hydra: a wrong key or value is an error when composed; a killed run is found again; jobs of a sweep keep apart"
)
def test_a_killed_run_is_found_again_and_resumed(scripts: Scripts) -> None:
    arguments = ("experiment=gpt_stdlib", *COMMON, "trainer.max_steps=12")
    scripts.survives("examples/train.py", *arguments, kills=["step 7"])
    assert (scripts.directory / "runs" / "gpt_stdlib" / "memckpt").is_dir()


@pytest.mark.promise(
    "Hydra: a wrong key or value is an error when composed; a killed run is found again; jobs of a sweep keep apart"
)
@pytest.mark.slow
def test_each_job_of_a_multirun_has_a_run_of_its_own_and_is_found_again(scripts: Scripts) -> None:
    arguments = ("experiment=digits_cnn", *COMMON, "trainer.max_epochs=1", "model.width=4,8", "--multirun")
    expected = scripts.run("examples/train.py", *arguments, directory=scripts.lab.directory / "undisturbed")
    words = re.findall(r"^done at .*$", expected, re.MULTILINE)
    assert len(set(words)) == 2
    scripts.killed("step 12", "examples/train.py", *arguments, sights=2)  # in the second job
    final = scripts.run("examples/train.py", *arguments)
    assert re.findall(r"^done at .*$", final, re.MULTILINE) == words
    assert len(re.findall(r"resumed at step 1[12] from local memory", final)) == 1
    for name in ("model.width=4", "model.width=8"):
        assert len(list((scripts.directory / "runs" / "digits_cnn").glob(f"*{name}*/memckpt"))) == 1


def test_a_directory_with_a_timestamp_is_warned_of(scripts: Scripts) -> None:
    arguments = ("experiment=digits_cnn", *COMMON, "trainer.max_epochs=1", "+trainer.limit_train_batches=2")
    log = scripts.run("examples/train.py", *arguments, "hydra.run.dir=outputs/${now:%H-%M-%S}")
    assert "Hydra's output directory has a timestamp in its name" in log
    log = scripts.run("examples/train.py", *arguments, "hydra.run.dir=outputs/${now:%H-%M}", "run_dir=fixed")
    assert "has a timestamp" not in log
    assert last_words(log)


_LOOK = """
import hydra, memckpt_hydra
@hydra.main(version_base="1.3", config_path=None)
def main(cfg):
    print(memckpt_hydra.protection(cfg).run_dir)
main()
"""


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        (["+run_dir=fixed"], None),
        (["+run_dir=fixed", "hydra.job.chdir=true"], "has a timestamp in its name"),
        (["+run_dir=fixed", "hydra.job.chdir=true", "hydra.run.dir=same"], None),
        (["+run_dir=/fixed", "hydra.job.chdir=true"], None),
        (["+run_dir=fixed", "+width=1,2", "--multirun"], "has the run_dir 'fixed', where only their order"),
        (["+run_dir=of-${width}", "+width=1,2", "--multirun"], None),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_run_directory_that_moves_or_is_shared_is_warned_of(
    overrides: list[str], warning: str | None, tmp_path: Path
) -> None:
    (tmp_path / "look.py").write_text(_LOOK)
    done = subprocess.run(
        [sys.executable, "look.py", "+memckpt=default", *overrides],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=True,
    )
    said = "WARNING" in done.stdout or "memckpt: " in done.stdout
    assert said is (warning is not None), done.stdout
    assert warning is None or warning in done.stdout
