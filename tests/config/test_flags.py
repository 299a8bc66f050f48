"""Settings from a command line: argparse, and LightningCLI; one definition, every field, and a real run."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import pytest

import memckpt
from memckpt.compression import HalfPrecision, PowerSGD, Quantized8, RandomK, TopK
from memckpt.config import AgentConfig, ErasureConfig, MemckptConfig, StorageConfig, parse_resume
from memckpt.config.settings import Setting, describe_settings, from_mapping, to_mapping
from memckpt.errors import ConfigurationError
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.flags import parse
from tests.support.trainings.script_runs import Scripts

#: For every setting another value than its default, as text and as the dataclass has it.
OTHER_VALUES: dict[str, tuple[str, Any]] = {
    "redo": ("lazy", "lazy"),
    "tap": ("step", "step"),
    "anchor_period_steps": ("5", 5),
    "slots": ("4", 4),
    "snapshot_every_steps": ("25", 25),
    "resume_check": ("require", "require"),
    "accept_changes": ("true", True),
    "log_metrics": ("false", False),
    "tuning": ("off", "off"),
    "overhead_budget": ("0.05", 0.05),
    "audit_budget": ("0.5", 0.5),
    "mtbf_seconds": ("3600", 3600.0),
    "agent.threads": ("2", 2),
    "agent.linger_seconds": ("60", 60.0),
    "agent.memory_budget_bytes": ("1000000", 1_000_000),
    "agent.start_seconds": ("5.5", 5.5),
    "agent.liveness_seconds": ("7.5", 7.5),
    "agent.fence_seconds": ("90", 90.0),
    "agent.niceness": ("0", 0),
    "agent.metrics_port": ("0", 0),
    "agent.metrics_host": ("0.0.0.0", "0.0.0.0"),
    "agent.metrics_file": ("m.prom", "m.prom"),
    "peers.ack": ("proceed", "proceed"),
    "peers.every_steps": ("12", 12),
    "peers.security": ("plain", "plain"),
    "peers.host": ("eth0", "eth0"),
    "peers.port": ("29600", 29_600),
    "peers.rate_bytes_per_second": ("1e8", 1e8),
    "peers.overhead": ("0.1", 0.1),
    "peers.domain_level": ("rack", "rack"),
    "peers.rack": ("r7", "r7"),
    "peers.zone": ("b", "b"),
    "peers.ack_timeout_seconds": ("30", 30.0),
    "peers.recovery_patience_seconds": ("60", 60.0),
    "peers.data": ("4", 4),
    "peers.tolerate": ("2", 2),
    "peers.backend": ("isa_l_rs_vand", "isa_l_rs_vand"),
    "compression.min_elements": ("64", 64),
    "compression.error_feedback": ("false", False),
    "compression.residual": ("drop", "drop"),
    "compression.ratio": ("0.1", 0.1),
    "compression.seed": ("7", 7),
    "compression.block_elements": ("64", 64),
    "compression.rank": ("2", 2),
    "compression.start_seed": ("7", 7),
    "compression.dtype": ("fp16", "fp16"),
    "storage.url": ("s3://bucket/run", "s3://bucket/run"),
    "storage.mode": ("log", "log"),
    "storage.every_steps": ("100", 100),
    "storage.batch_steps": ("4", 4),
    "storage.min_seconds": ("1", 1.0),
    "storage.overhead": ("0.5", 0.5),
    "storage.keep_last": ("7", 7),
    "storage.owner": ("gpt-7", "gpt-7"),
    "storage.keep_every_steps": ("1000", 1000),
    "storage.timeout_seconds": ("9", 9.0),
    "storage.grace_seconds": ("3", 3.0),
}
VALUES = [each for each in describe_settings() if each.kind is not None]


def look_up(config: object, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name)
    return config


def test_nothing_given_is_the_default() -> None:
    assert parse(run_dir="runs/default") == ("runs/default", "auto", MemckptConfig())
    assert parse("--run-dir", "x", run_dir="runs/default").run_dir == "x"


def test_step_zero_of_the_environment_is_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMCKPT_RESUME", "0")
    assert parse(run_dir="x").resume == 0
    assert parse("--resume", "auto", run_dir="x").resume == "auto"


def test_what_is_true_or_false_needs_no_value() -> None:
    assert parse("--run-dir", "x", "--memckpt-accept-changes").config.accept_changes
    assert not parse("--run-dir", "x", "--memckpt-accept-changes", "false").config.accept_changes
    with pytest.raises(argparse.ArgumentError, match="expected true or false, found 'perhaps'"):
        parse("--run-dir", "x", "--memckpt-accept-changes", "perhaps")


def test_a_percent_sign_in_the_run_directory_does_not_break_the_help() -> None:
    parser = argparse.ArgumentParser()
    memckpt.add_arguments(parser, run_dir="runs/50%d")
    assert "runs/50%d" in parser.format_help()


def test_an_empty_run_directory_is_an_error() -> None:
    with pytest.raises(argparse.ArgumentError, match="--run-dir: expected a directory, found ''"):
        parse("--run-dir", "")


def test_every_field_of_every_dataclass_is_an_option() -> None:
    paths = [each.path for each in describe_settings()]
    fields = {each.name for each in dataclasses.fields(MemckptConfig)} - {"agent"}
    fields |= {f"agent.{each.name}" for each in dataclasses.fields(AgentConfig)}
    fields |= {f"storage.{each.name}" for each in dataclasses.fields(StorageConfig)}
    fields |= {f"peers.{each.name}" for each in dataclasses.fields(ErasureConfig)}
    for kind in (TopK, RandomK, Quantized8, PowerSGD, HalfPrecision):
        fields |= {f"compression.{each.name}" for each in dataclasses.fields(kind)}
    assert sorted(paths) == sorted(fields)
    assert OTHER_VALUES.keys() == fields - {"storage", "peers", "compression"}


@pytest.mark.promise("a flag sets its field and no other; `--resume` works as described, also with LightningCLI")
@pytest.mark.parametrize("setting", VALUES, ids=lambda setting: setting.path)
def test_each_option_sets_its_field_and_no_other(setting: Setting) -> None:
    text, value = OTHER_VALUES[setting.path]
    part = setting.part if setting.variants else "peers"
    for variant in setting.variants or ("none",):
        found = parse("--run-dir", "x", setting.option, text, f"--memckpt-{part}", variant).config
        assert look_up(found, setting.path) == value != setting.default
        for other in VALUES:
            there = not other.variants or (other.part == part and variant in other.variants)
            if there and other.path != setting.path:
                assert look_up(found, other.path) == other.default
    assert setting.help.endswith(".")


def test_storage_can_be_switched_off_and_an_optional_value_be_none() -> None:
    assert (
        parse("--run-dir", "x", "--memckpt-storage", "off", "--memckpt-storage-keep-last", "4").config.storage is None
    )
    assert parse("--run-dir", "x", "--memckpt-storage-every-steps", "none").config == MemckptConfig()


@pytest.mark.parametrize(
    ("arguments", "environment", "peers"),
    [
        (["erasure", "data=4", "tolerate=2"], {}, ErasureConfig(data=4, tolerate=2)),
        (["none", "data=4"], {}, None),
        ([], {"PEERS": "erasure", "PEERS_DATA": "4"}, ErasureConfig(data=4)),
        (["data=3"], {"PEERS": "erasure", "PEERS_ACK": "proceed"}, ErasureConfig(data=3, ack="proceed")),
        (["none"], {"PEERS": "erasure", "PEERS_DATA": "4"}, None),
    ],
)
def test_peers_are_those_that_are_named(
    arguments: list[str], environment: dict[str, str], peers: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert peers_of(arguments, environment, monkeypatch) == peers


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["port=5"], {}, "--memckpt-peers-port: expected --memckpt-peers erasure beside it, found nothing"),
        (
            ["data=4"],
            {"PEERS": "none"},
            "--memckpt-peers-data: expected --memckpt-peers erasure beside it, found nothing",
        ),
    ],
)
def test_an_option_of_peers_that_are_off_is_named(
    arguments: list[str], environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match=f"^{message}$"):
        peers_of(arguments, environment, monkeypatch)


def peers_of(arguments: list[str], environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> object:
    for name, value in environment.items():
        monkeypatch.setenv(f"MEMCKPT_{name}", value)
    options: list[str] = []
    for argument in arguments:
        name, _, value = argument.rpartition("=")
        options += [f"--memckpt-peers-{name}".rstrip("-"), value]
    return parse("--run-dir", "x", *options).config.peers


def test_the_help_says_of_which_variant_an_option_is() -> None:
    parser = argparse.ArgumentParser()
    memckpt.add_arguments(parser)
    shown = " ".join(parser.format_help().split())
    assert "--memckpt-peers erasure " in shown
    assert "(with erasure; default: MEMCKPT_PEERS_DATA, or 2)" in shown
    assert "(with topk or randomk; default: MEMCKPT_COMPRESSION_RATIO, or 0.01)" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memckpt-redo", "often"], "--memckpt-redo: expected 'auto', 'eager', 'lazy' or 'snapshot', found 'often'"),
        (
            ["--memckpt-slots", "many"],
            "argument --memckpt-slots: expected a whole number, 2 to 64, or 'none', found 'many'",
        ),
        (["--memckpt-slots", "1"], "argument --memckpt-slots: expected a whole number, 2 to 64, or 'none', found '1'"),
        (
            ["--memckpt-storage-every-steps", "x"],
            "every-steps: expected a whole number, 1 or more, or 'none', found 'x'",
        ),
        (["--memckpt-storage", "maybe"], "argument --memckpt-storage: expected on, off or none, found 'maybe'"),
        (
            ["--resume", "latest"],
            "expected 'auto', 'require', 'exact', 'never' or a step number of 0 or more, found 'latest'",
        ),
    ],
)
def test_a_wrong_value_is_an_error_that_names_the_option(arguments: list[str], message: str) -> None:
    with pytest.raises(argparse.ArgumentError, match=re.escape(message)):
        parse("--run-dir", "x", *arguments)


def test_an_option_of_storage_wins_over_a_variable_that_switches_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMCKPT_STORAGE", "none")
    assert parse("--run-dir", "x").config.storage is None
    storage = parse("--run-dir", "x", "--memckpt-storage-keep-last", "4").config.storage
    assert storage is not None
    assert storage.keep_last == 4
    assert (
        parse("--run-dir", "x", "--memckpt-storage-keep-last", "4", "--memckpt-storage", "off").config.storage is None
    )


def test_an_option_wins_over_a_variable_and_a_variable_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RUN_DIR": "there", "RESUME": "7", "SLOTS": "5", "REDO": "lazy", "AGENT_THREADS": "0"}.items():
        monkeypatch.setenv(f"MEMCKPT_{name}", value)
    found = parse("--memckpt-slots", "4", "--memckpt-agent-threads", "2")
    assert (found.run_dir, found.resume, found.config.redo, found.config.slots) == ("there", 7, "lazy", 4)
    assert found.config.agent.threads == 2
    assert parse("--run-dir", "here", "--resume", "never", "--memckpt-agent-threads", "2")[:2] == ("here", "never")
    with pytest.raises(
        ConfigurationError, match="MEMCKPT_AGENT_THREADS: expected a whole number, 1 or more, found '0'"
    ):
        parse()


@pytest.mark.parametrize(("text", "value"), [("auto", "auto"), ("never", "never"), ("17", 17), (17, 17)])
def test_how_to_resume(text: object, value: object) -> None:
    assert parse_resume(text) == value
    assert parse("--run-dir", "x", "--resume", str(text)).resume == value


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"slotz": 1}, "slotz: expected one of redo, tap, anchor_period_steps, slots, snapshot_every_steps, agent,"),
        ({"agent": {"thread": 1}}, "agent.thread: expected one of threads, linger_seconds"),
        ({"slots": "3"}, "slots: expected a whole number, 2 to 64, or None, found '3'"),
        ({"slots": True}, "slots: expected a whole number, 2 to 64, or None, found True"),
        ({"agent": None}, "agent: expected a mapping, found None"),
        ({"peers": "erasure"}, "peers: expected a mapping, found 'erasure'"),
        ({"peers": {"data": 4}}, "peers.kind: expected 'erasure', found none"),
        ({"peers": {"kind": "raid"}}, "peers.kind: expected 'erasure', found 'raid'"),
        (
            {"peers": {"kind": "mirror", "copies": 2}},
            "peers.kind: expected 'erasure', found 'mirror'",
        ),
        ({"peers": {"kind": "erasure", "copies": 4}}, "peers.copies: expected one of data, tolerate, backend,"),
        ({"peers": {"kind": "erasure", "data": 0}}, "peers.data: expected a whole number, 1 to 32, found 0"),
    ],
)
def test_a_wrong_mapping_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        from_mapping(values)


@pytest.mark.parametrize("peers", [None, ErasureConfig(data=4, host="eth0")])
@pytest.mark.parametrize("storage", [None, StorageConfig(every_steps=7)])
def test_a_mapping_has_all_of_a_configuration(peers: Any, storage: Any) -> None:
    config = MemckptConfig(slots=4, agent=AgentConfig(threads=2), peers=peers, storage=storage)
    assert from_mapping(to_mapping(config)) == config


# LightningCLI


@pytest.fixture(scope="session")
def _imported() -> None:
    import torchmetrics  # noqa: F401


@pytest.fixture
def scripts(_imported: None, lab: Lab) -> Iterator[Scripts]:
    return Scripts(lab)


APP = "tests/support/trainings/lightning_cli_app.py"
FIT = ("fit", "--trainer.max_epochs", "1", "--trainer.accelerator", "cpu")
CONFIG = ("--memckpt.storage", "null", "--memckpt.redo", "lazy", "--memckpt.agent.linger_seconds", "60")


@pytest.mark.promise("a flag sets its field and no other; `--resume` works as described, also with LightningCLI")
@pytest.mark.slow
def test_an_application_is_killed_and_resumes_as_its_flag_says(scripts: Scripts) -> None:
    arguments = (*FIT, "--run_dir", "run", *CONFIG)
    logs = scripts.survives(APP, *arguments, "--resume", "auto", kills=["step 12"])
    assert "lazy redo (as configured)" in logs[0]
    scripts.killed("step 12", APP, *arguments)
    # The line comes before the commit of its step: 9 to 11 are held, or 10 to 12.
    chosen = scripts.killed("step 12", APP, *arguments, "--resume", "10")
    assert "resumed at step 10 from local memory" in chosen
    anew = scripts.killed("step 2", APP, *arguments, "--resume", "never")
    assert re.search(r"^step 1: loss", anew, re.MULTILINE)
    scripts.lab.stop(scripts.directory / "run")
    assert "NothingHeldError" in _fails(scripts, *arguments, "--resume", "require")
    scripts.lab.stop(scripts.directory / "run")


def test_a_callback_in_a_configuration_file_is_given_the_flag(scripts: Scripts) -> None:
    (scripts.directory / "config.yaml").write_text(
        "trainer:\n"
        "  callbacks:\n"
        "  - class_path: lightning_memckpt.MemCheckpoint\n"
        "    init_args: {run_dir: run, config: {storage: null}}\n"
    )
    arguments = ("fit", "--config", "config.yaml", *FIT[1:])
    assert "NothingHeldError" in _fails(scripts, *arguments, "--resume", "require")
    scripts.lab.stop(scripts.directory / "run")
    assert "expected none beside a MemCheckpoint in trainer.callbacks" in _fails(scripts, *arguments, "--run_dir", "x")


def test_flags_that_cannot_be_are_refused(scripts: Scripts) -> None:
    assert "--resume require: expected --run_dir, MEMCKPT_RUN_DIR or a MemCheckpoint" in _fails(
        scripts, *FIT, "--resume", "require"
    )
    said = _fails(scripts, *FIT, "--run_dir", "run", "--resume", "latest")
    assert "resume" in said
    assert "auto" in said
    assert "memckpt.redo" in _fails(scripts, *FIT, "--run_dir", "run", "--memckpt.redo", "often")


@pytest.mark.parametrize(
    ("flags", "environment", "peers"),
    [
        ("peers.kind=erasure peers.ack=proceed", None, ErasureConfig(ack="proceed")),
        (
            "peers.kind=erasure peers.data=4 peers.rate_bytes_per_second=1e8",
            None,
            ErasureConfig(data=4, rate_bytes_per_second=1e8),
        ),
        ("slots=4", None, None),
        ("slots=4", "erasure", ErasureConfig()),
        ("peers.ack=proceed", "erasure", ErasureConfig(ack="proceed")),
        ("peers=null", "erasure", None),
    ],
)
def test_peers_of_a_lightning_cli(
    flags: str, environment: str | None, peers: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    if environment is not None:
        monkeypatch.setenv("MEMCKPT_PEERS", environment)
    assert _cli_config(flags).peers == peers


def test_a_flag_that_peers_do_not_have_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"peers\.copies: expected one of data, .*, found 'copies'"):
        _cli_config("peers.kind=erasure peers.copies=4")
    with pytest.raises(ConfigurationError, match=r"peers\.kind: expected 'erasure', found none"):
        _cli_config("peers.data=4")


@pytest.mark.parametrize(
    ("flags", "environment", "compression"),
    [
        ("compression.kind=topk compression.ratio=0.1", None, TopK(ratio=0.1)),
        ("compression.kind=powersgd", "topk", PowerSGD()),
        ("compression.kind=randomk compression.ratio=0.1", "topk", RandomK(ratio=0.1)),
        ("compression.ratio=0.1", "randomk", RandomK(ratio=0.1)),
        ("slots=4", "halfprecision", HalfPrecision()),
        ("compression=null", "topk", None),
    ],
)
def test_compression_of_a_lightning_cli(
    flags: str, environment: str | None, compression: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    if environment is not None:
        monkeypatch.setenv("MEMCKPT_COMPRESSION", environment)
    assert _cli_config(flags).compression == compression


def test_compression_that_cannot_be_is_named_by_a_lightning_cli() -> None:
    with pytest.raises(ConfigurationError, match=r"compression\.kind: expected 'topk' or .*, found none"):
        _cli_config("compression.ratio=0.1")
    with pytest.raises(ConfigurationError, match=r"compression\.ratio: expected a number, more than 0.*, found 2\.0"):
        _cli_config("compression.kind=topk compression.ratio=2.0")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("{compression: {kind: topk, ratio: 0.1}}", MemckptConfig(compression=TopK(ratio=0.1))),
        ("{compression: {kind: powersgd}, storage: null}", MemckptConfig(compression=PowerSGD(), storage=None)),
        ("{peers: {kind: erasure}, slots: 4}", MemckptConfig(peers=ErasureConfig(), slots=4)),
        ("{slots: 4}", MemckptConfig(slots=4)),
    ],
)
def test_settings_of_a_callback_in_a_file(config: str, expected: MemckptConfig) -> None:
    """A mapping as in every file of ours, though jsonargparse would have a class_path among several dataclasses."""
    assert _callback_config(config) == expected


def test_settings_of_a_callback_in_a_file_that_cannot_be() -> None:
    with pytest.raises(ConfigurationError, match=r"compression\.ratio: expected a number, more than 0.*, found 2"):
        _callback_config("{compression: {kind: topk, ratio: 2}}")


def _callback_config(text: str) -> MemckptConfig:
    """The settings of a callback that a file of LightningCLI names."""
    from jsonargparse import ArgumentParser

    from lightning_memckpt import MemCheckpoint

    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--callback", type=MemCheckpoint)
    written = f"{{class_path: lightning_memckpt.MemCheckpoint, init_args: {{run_dir: run, config: {text}}}}}"
    made = parser.instantiate(parser.parse_args([f"--callback={written}"])).callback
    assert isinstance(made, MemCheckpoint)
    return made.config


def _cli_config(flags: str) -> MemckptConfig:
    """What a MemCheckpointCLI gives to its callback."""
    from lightning.pytorch.demos.boring_classes import BoringModel

    from lightning_memckpt import MemCheckpoint
    from lightning_memckpt.cli import MemCheckpointCLI

    arguments = ["--run_dir", "run", *(f"--memckpt.{flag}" for flag in flags.split())]
    defaults = {"logger": False, "accelerator": "cpu"}
    cli = MemCheckpointCLI(BoringModel, trainer_defaults=defaults, run=False, args=arguments)
    (callback,) = [each for each in cli.trainer.callbacks if isinstance(each, MemCheckpoint)]  # type: ignore[attr-defined]
    return callback.config


def _fails(scripts: Scripts, *arguments: str) -> str:
    child = scripts.start(APP, *arguments)
    assert child.wait() == 3, child.log.read_text()
    return child.log.read_text()


@pytest.mark.parametrize("place", ["trainer_defaults", "add_lightning_class_args"])
def test_a_callback_of_the_program_is_given_the_flag(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.cli import LightningArgumentParser
    from lightning.pytorch.demos.boring_classes import BoringModel

    from lightning_memckpt import MemCheckpoint
    from lightning_memckpt.cli import MemCheckpointCLI

    class OfTheProgram(MemCheckpointCLI):
        def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
            if place == "add_lightning_class_args":
                parser.add_lightning_class_args(MemCheckpoint, "ckpt")
                parser.set_defaults({"ckpt.run_dir": "runs/own"})

    def found(*flags: str) -> list[tuple[str, Any]]:
        defaults: dict[str, Any] = {"logger": False, "accelerator": "cpu"}
        if place == "trainer_defaults":
            defaults["callbacks"] = [MemCheckpoint("runs/own")]
        cli = OfTheProgram(BoringModel, trainer_defaults=defaults, run=False, args=list(flags))
        return [(each.run_dir, each.resume) for each in cli.trainer.callbacks if isinstance(each, MemCheckpoint)]  # type: ignore[attr-defined]

    monkeypatch.setenv("MEMCKPT_RUN_DIR", "runs/elsewhere")
    assert found() == [("runs/own", "auto")]
    assert found("--resume", "require") == [("runs/own", "require")]
    with pytest.raises(ConfigurationError, match=r"--run_dir: expected none beside a MemCheckpoint .*of runs/own"):
        found("--run_dir", "runs/other")
