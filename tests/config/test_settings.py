"""Settings from outside of Python: variables, options, files and LightningCLI; one definition, every field."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import yaml
from accelerate import Accelerator
from torch import nn

import memckpt
from accelerate_plugin import MemCheckpointPlugin
from lightning_memckpt import MemCheckpoint
from memckpt.config import (
    AgentConfig,
    CompressionConfig,
    ErasureConfig,
    HalfPrecision,
    LossyConfig,
    MemckptConfig,
    PowerSGD,
    Quantized8,
    RandomK,
    SparseConfig,
    StorageConfig,
    TopK,
    parse_resume,
)
from memckpt.config.arguments import (
    config_from_environment,
    resume_from_environment,
    run_dir_from_environment,
    with_environment,
)
from memckpt.config.settings import Setting, describe_settings, from_mapping, to_mapping
from memckpt.errors import ConfigurationError, UsageError
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.flags import parse
from tests.support.trainings.script_runs import Scripts
from transformers_memckpt import MemCheckpointTrainerCallback

SETTINGS = {each.path: each for each in describe_settings()}
VALUES = [each for each in SETTINGS.values() if each.kind is not None]


def other_value(setting: Setting) -> Any:
    """Another value than its default."""
    default, kind = setting.default, setting.kind
    if setting.choices:
        return next(one for one in setting.choices if one not in (default, "auto"))
    if kind is bool:
        return not default
    if kind is float:
        return 5.5 if default is None else default / 2
    if type(default) is tuple:
        return ("other",)
    return "other" if kind is str else 5 if default is None else default + 1


def look_up(config: object, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name)
    return config


def test_nothing_given_is_the_default() -> None:
    assert parse(run_dir="runs/default") == ("runs/default", "auto", MemckptConfig())
    assert parse("--run-dir", "x", run_dir="runs/default").run_dir == "x"
    assert config_from_environment({}) == MemckptConfig()
    assert run_dir_from_environment({}) is None
    assert resume_from_environment({}) is None


def test_step_zero_of_the_environment_is_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMCKPT_RESUME", "0")
    assert parse(run_dir="x").resume == 0
    assert parse("--resume", "auto", run_dir="x").resume == "auto"


def test_what_is_true_or_false_needs_no_value() -> None:
    assert parse("--run-dir", "x", "--memckpt-accept-changes").config.accept_changes
    assert not parse("--run-dir", "x", "--memckpt-accept-changes", "false").config.accept_changes


def test_a_percent_sign_in_the_run_directory_does_not_break_the_help() -> None:
    parser = argparse.ArgumentParser()
    memckpt.add_arguments(parser, run_dir="runs/50%d")
    assert "runs/50%d" in parser.format_help()


def test_every_field_of_every_dataclass_is_an_option() -> None:
    fields = {each.name for each in dataclasses.fields(MemckptConfig)} - {"agent"}
    fields |= {f"agent.{each.name}" for each in dataclasses.fields(AgentConfig)}
    fields |= {f"storage.{each.name}" for each in dataclasses.fields(StorageConfig)}
    fields |= {f"peers.{each.name}" for each in dataclasses.fields(ErasureConfig)}
    for kind in (TopK, RandomK, Quantized8, PowerSGD, HalfPrecision):
        fields |= {f"compression.{each.name}" for each in dataclasses.fields(kind)}
    assert sorted(each.path for each in describe_settings()) == sorted(fields)


@pytest.mark.promise("a flag sets its field and no other; `--resume` works as described, also with LightningCLI")
@pytest.mark.parametrize("setting", VALUES, ids=lambda setting: setting.path)
def test_each_option_and_each_variable_sets_its_field_and_no_other(setting: Setting) -> None:
    value = other_value(setting)
    text = ",".join(value) if type(value) is tuple else str(value).lower() if setting.kind is bool else str(value)
    part = setting.part if setting.variants else "peers"
    for variant in setting.variants or ("none",):
        found = parse("--run-dir", "x", setting.option, text, f"--memckpt-{part}", variant).config
        assert look_up(found, setting.path) == value != setting.default
        for other in VALUES:
            there = not other.variants or (other.part == part and variant in other.variants)
            if there and other.path != setting.path:
                assert look_up(found, other.path) == other.default
        assert config_from_environment({setting.variable: text, f"MEMCKPT_{part.upper()}": variant}) == found
    assert setting.help.endswith(".")


def test_storage_can_be_switched_off_and_an_optional_value_be_none() -> None:
    off = ("--memckpt-storage", "off", "--memckpt-storage-keep-last", "4")
    assert parse("--run-dir", "x", *off).config.storage is None
    assert config_from_environment({"MEMCKPT_STORAGE": "none"}).storage is None
    assert parse("--run-dir", "x", "--memckpt-storage-every-steps", "none").config == MemckptConfig()
    assert config_from_environment({"MEMCKPT_ANCHOR_PERIOD_STEPS": "None"}).anchor_period_steps is None


@pytest.mark.parametrize(
    ("arguments", "environment", "peers"),
    [
        (["erasure", "data=4", "tolerate=2"], {}, ErasureConfig(data=4, tolerate=2)),
        (["none", "data=4"], {}, None),
        ([], {}, None),
        ([], {"PEERS": "off", "PEERS_DATA": "4"}, None),
        ([], {"PEERS": "erasure", "PEERS_DATA": "4"}, ErasureConfig(data=4)),
        (["data=3"], {"PEERS": "erasure", "PEERS_ACK": "proceed"}, ErasureConfig(data=3, ack="proceed")),
        (["none"], {"PEERS": "erasure", "PEERS_DATA": "4"}, None),
    ],
)
def test_peers_are_those_that_are_named(
    arguments: list[str], environment: dict[str, str], peers: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(f"MEMCKPT_{name}", value)
    assert parse("--run-dir", "x", *options_of("peers", arguments)).config.peers == peers


def options_of(part: str, arguments: list[str]) -> list[str]:
    """Options of a part of the settings, from texts such as ``data=4``, or the name of a variant."""
    options: list[str] = []
    for argument in arguments:
        name, _, value = argument.rpartition("=")
        options += [f"--memckpt-{part}-{name}".rstrip("-"), value]
    return options


@pytest.mark.parametrize(
    ("part", "given", "field", "expected"),
    [
        ("peers", [], "port=5", "{part}erasure beside it, found nothing"),
        ("compression", ["topk"], "rank=2", "{part}powersgd beside it, found topk"),
        ("compression", [], "ratio=0.1", "{part}topk or randomk beside it, found nothing"),
    ],
)
def test_a_setting_of_a_variant_that_is_not_chosen_is_named(
    part: str, given: list[str], field: str, expected: str
) -> None:
    name, _, value = field.partition("=")
    message = f"--memckpt-{part}-{name}: expected {expected.format(part=f'--memckpt-{part} ')}"
    with pytest.raises(ConfigurationError, match=f"^{message}$"):
        parse("--run-dir", "x", *options_of(part, [*given, field]))
    variable = f"MEMCKPT_{part.upper()}"
    message = f"{variable}_{name.upper()}: expected {expected.format(part=f'{variable}=')}"
    with pytest.raises(ConfigurationError, match=f"^{message}$"):
        config_from_environment({f"{variable}_{name.upper()}": value, **dict(zip([variable], given, strict=False))})


def test_the_help_says_of_which_variant_an_option_is() -> None:
    parser = argparse.ArgumentParser()
    memckpt.add_arguments(parser)
    shown = " ".join(parser.format_help().split())
    assert "--memckpt-peers erasure " in shown
    assert "(with erasure; default: MEMCKPT_PEERS_DATA, or 2)" in shown
    assert "(with topk or randomk; default: MEMCKPT_COMPRESSION_RATIO, or 0.01)" in shown


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("redo", "fast", "expected 'auto', 'eager', 'lazy' or 'snapshot', found 'fast'"),
        ("snapshot_every_steps", "three", "expected a whole number, 1 to 1000000, found 'three'"),
        ("snapshot_every_steps", "none", "expected a whole number, 1 to 1000000, found 'none'"),
        ("slots", "1", "expected a whole number, 2 to 64, or 'none', found '1'"),
        ("accept_changes", "perhaps", "expected true or false, found 'perhaps'"),
        ("override", "lr,", "expected names, separated by commas, found 'lr,'"),
        ("agent.threads", "0", "expected a whole number, 1 or more, found '0'"),
        ("storage", "s3://b", "expected on, off or none, found 's3://b'"),
        ("storage.url", "", "expected a text, not empty, or 'none', found ''"),
        ("storage.overhead", "2", "expected a number, more than 0, at most 1, found '2'"),
        ("peers", "raid", "expected erasure or none, found 'raid'"),
        ("compression", "gzip", "expected topk, randomk, quantized8, powersgd, halfprecision or none, found 'gzip'"),
        ("compression.ratio", "nan", "expected a number, more than 0, less than 1, found 'nan'"),
    ],
)
def test_a_wrong_value_is_named_with_its_option_and_its_variable(path: str, text: str, expected: str) -> None:
    setting = SETTINGS[path]
    remedy = "; the location is set by MEMCKPT_STORAGE_URL" if path == "storage" else ""
    with pytest.raises(ConfigurationError, match=re.escape(f"{setting.variable}: {expected}{remedy}")):
        config_from_environment({setting.variable: text})
    with pytest.raises(argparse.ArgumentError, match=re.escape(f"argument {setting.option}: {expected}")):
        parse("--run-dir", "x", setting.option, text)


@pytest.mark.parametrize("setting", VALUES, ids=lambda setting: setting.path)
def test_each_setting_has_limits_and_is_named_where_a_value_is_beyond(setting: Setting) -> None:
    wrong = "-1000000" if setting.kind in (int, float) else "" if setting.kind is str and not setting.choices else "x"
    variant = {f"MEMCKPT_{setting.part.upper()}": setting.variants[0]} if setting.variants else {}
    with pytest.raises(ConfigurationError, match=f"^{setting.variable}: expected .*, found '{wrong}'"):
        config_from_environment({setting.variable: wrong, **variant})


def test_an_option_of_storage_wins_over_a_variable_that_switches_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMCKPT_STORAGE", "none")
    keep_4 = ("--memckpt-storage-keep-last", "4")
    assert parse("--run-dir", "x").config.storage is None
    assert parse("--run-dir", "x", *keep_4).config.storage == StorageConfig(keep_last=4)
    assert parse("--run-dir", "x", *keep_4, "--memckpt-storage", "off").config.storage is None


def test_an_option_wins_over_a_variable_and_a_variable_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RUN_DIR": "there", "RESUME": "7", "SLOTS": "5", "REDO": "lazy", "AGENT_THREADS": "0"}.items():
        monkeypatch.setenv(f"MEMCKPT_{name}", value)
    found = parse("--memckpt-slots", "4", "--memckpt-agent-threads", "2")
    assert (found.run_dir, found.resume, found.config.redo, found.config.slots) == ("there", 7, "lazy", 4)
    assert found.config.agent.threads == 2
    assert parse("--run-dir", "here", "--resume", "never", "--memckpt-agent-threads", "2")[:2] == ("here", "never")
    with pytest.raises(ConfigurationError, match="MEMCKPT_AGENT_THREADS: expected a whole number, 1 or more, found"):
        parse()


def test_what_is_passed_in_python_wins_in_every_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="run_dir: expected a directory as argument or in MEMCKPT_RUN_DIR"):
        with_environment(None, None, None)
    for name, value in {"MEMCKPT_RUN_DIR": "there", "MEMCKPT_RESUME": "7", "MEMCKPT_SLOTS": "5"}.items():
        monkeypatch.setenv(name, value)
    assert with_environment(None, None, None) == ("there", 7, MemckptConfig(slots=5))
    assert with_environment("here", "auto", MemckptConfig()) == ("here", "auto", MemckptConfig())
    for made in (MemCheckpoint(), MemCheckpointTrainerCallback(), MemCheckpointPlugin(Accelerator(cpu=True))):
        assert (made.run_dir, made.resume, made.config) == ("there", 7, MemckptConfig(slots=5))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"config": "lazy"}, "config: expected a MemckptConfig, or a mapping of its fields, found 'lazy'"),
        ({"config": "there"}, "found 'there'; a directory is given as run_dir='there'"),
        ({"config": False}, "config: expected a MemckptConfig, or a mapping of its fields, found False"),
        ({"config": {"slots": "3"}}, "slots: expected a whole number, 2 to 64, or None, found '3'"),
        ({"run_dir": 5}, "run_dir: expected a directory, found 5"),
    ],
)
def test_a_wrong_argument_of_python_is_named_in_every_adapter(given: dict[str, Any], message: str) -> None:
    model = nn.Linear(2, 2)
    makers: list[Callable[..., object]] = [
        MemCheckpoint,
        MemCheckpointTrainerCallback,
        partial(MemCheckpointPlugin, Accelerator(cpu=True)),
        partial(memckpt.attach, model, torch.optim.SGD(model.parameters(), 0.1)),
    ]
    for make in makers:
        with pytest.raises(ConfigurationError, match=re.escape(message)):
            make(**{"run_dir": "there", **given})
    assert with_environment("there", None, {"agent": {"threads": 2}}).config.agent.threads == 2


def test_a_model_and_an_optimizer_that_are_none_are_named() -> None:
    model = nn.Linear(2, 2)
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    for given, found in [
        ((optimizer, model), "SGD, Linear"),
        ((model, None), "Linear, NoneType"),
        ((model, []), "Linear, NoneType"),
        ((model, model.parameters()), "Linear, Parameter"),
    ]:
        with pytest.raises(UsageError, match=f"its optimizer or a list of optimizers, found {found}; write attach"):
            memckpt.attach(*given, run_dir="there")


def test_a_setting_that_is_given_to_attach_without_its_name_is_shown_with_it() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    attach: Any = memckpt.attach
    misplaced = [
        ("there", "'there'; write attach(model, optimizer, run_dir='there')"),
        (MemckptConfig(), "MemckptConfig; write attach(model, optimizer, config=...)"),
        ({"slots": 3}, "dict; write attach(model, optimizer, config=...)"),
        (optimizer, "SGD; write attach(model, [optimizer, another])"),
        (5, "int; write attach(model, optimizer, run_dir=...)"),
    ]
    for given, said in misplaced:
        with pytest.raises(UsageError, match=re.escape(f"by its name, found a third one without, {said}")):
            attach(model, optimizer, given)


def test_a_variable_that_names_no_setting_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "memckpt"):
        config_from_environment({"MEMCKPT_REDOO": "lazy", "MEMCKPT_NODE": "a", "MEMCKPT_RACK": "c", "HOME": "/x"})
    assert [record.getMessage() for record in caplog.records] == [
        "memckpt: the environment variable MEMCKPT_REDOO names no setting and is ignored"
    ]


@pytest.mark.parametrize(
    ("text", "value"), [("auto", "auto"), ("require", "require"), ("never", "never"), ("17", 17), (17, 17)]
)
def test_how_to_resume(text: object, value: object) -> None:
    assert parse_resume(text) == value
    assert parse("--run-dir", "x", "--resume", str(text)).resume == value
    assert resume_from_environment({"MEMCKPT_RESUME": str(text)}) == value


@pytest.mark.parametrize("text", ["", "always", "-1", "1.5", "１２"])
def test_a_wrong_resume_is_named(text: str) -> None:
    expected = "expected 'auto', 'require', 'exact', 'never' or a step number of 0 or more, found"
    with pytest.raises(ConfigurationError, match=f"MEMCKPT_RESUME: {expected}"):
        resume_from_environment({"MEMCKPT_RESUME": text})
    with pytest.raises(argparse.ArgumentError, match=f"argument --resume: .*{expected}"):
        parse("--run-dir", "x", f"--resume={text}")


def test_an_empty_run_directory_is_named_and_is_not_the_current_one() -> None:
    with pytest.raises(ConfigurationError, match="MEMCKPT_RUN_DIR: expected a directory, found ''"):
        run_dir_from_environment({"MEMCKPT_RUN_DIR": ""})
    with pytest.raises(ConfigurationError, match="run_dir: expected a directory, found ''"):
        with_environment("", None, None)
    with pytest.raises(argparse.ArgumentError, match="--run-dir: expected a directory, found ''"):
        parse("--run-dir", "")


# Files


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"slotz": 1}, "slotz: expected one of redo, tap, anchor_period_steps, slots, snapshot_every_steps, agent,"),
        ({"agent": {"thread": 1}}, "agent.thread: expected one of threads, linger_seconds"),
        ({"slots": "3"}, "slots: expected a whole number, 2 to 64, or None, found '3'"),
        ({"slots": True}, "slots: expected a whole number, 2 to 64, or None, found True"),
        ({"agent": None}, "agent: expected a mapping, found None"),
        ({"peers": "erasure"}, "peers: expected a mapping, found 'erasure'; write {kind: erasure}"),
        ({"peers": "raid"}, "peers: expected a mapping, found 'raid'"),
        ({"peers": {"data": 4}}, "peers.kind: expected 'erasure', found none"),
        ({"peers": {"kind": "raid"}}, "peers.kind: expected 'erasure', found 'raid'"),
        ({"peers": {"kind": "erasure", "copies": 4}}, "peers.copies: expected one of data, tolerate, backend,"),
        ({"peers": {"kind": "erasure", "data": 0}}, "peers.data: expected a whole number, 1 to 32, found 0"),
        ({"compression": {"ratio": 0.1}}, "compression.kind: expected 'topk' or 'randomk' or 'quantized8' or"),
        ({"compression": {"kind": "topk", "rank": 2}}, "compression.rank: expected one of min_elements,"),
    ],
)
def test_a_wrong_mapping_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        from_mapping(values)


def test_names_come_as_a_list_and_as_words() -> None:
    expected = MemckptConfig(override=("lr", "betas"))
    assert from_mapping({"override": ["lr", "betas"]}) == expected
    assert config_from_environment({"MEMCKPT_OVERRIDE": "lr,betas"}) == expected
    assert config_from_environment({"MEMCKPT_OVERRIDE": "none"}) == MemckptConfig()
    assert _cli_config("override=[lr,betas]") == expected
    with pytest.raises(ConfigurationError, match="override: expected a tuple of names, found 'lr'"):
        MemckptConfig(override="lr")  # type: ignore[arg-type]


@pytest.mark.parametrize("peers", [None, ErasureConfig(data=4, host="eth0")])
@pytest.mark.parametrize("storage", [None, StorageConfig(every_steps=7)])
def test_a_mapping_has_all_of_a_configuration(peers: Any, storage: Any) -> None:
    config = MemckptConfig(slots=4, agent=AgentConfig(threads=2), peers=peers, storage=storage)
    assert from_mapping(to_mapping(config)) == config


# Compressors


#: A compressor with other values than the defaults, as a file has it.
WRITTEN: list[tuple[str, CompressionConfig]] = [
    ("{kind: topk, ratio: 0.02}", TopK(ratio=0.02)),
    ("{kind: randomk, ratio: 0.1, seed: 7}", RandomK(ratio=0.1, seed=7)),
    ("{kind: quantized8, block_elements: 64, residual: drop}", Quantized8(block_elements=64, residual="drop")),
    ("{kind: powersgd, rank: 2, min_elements: 16}", PowerSGD(rank=2, min_elements=16)),
    ("{kind: halfprecision, dtype: fp16}", HalfPrecision(dtype="fp16")),
    ("{kind: topk}", TopK()),
]


@pytest.mark.parametrize(("text", "compression"), WRITTEN)
def test_by_that_key_alone(text: str, compression: Any) -> None:
    """In a file, in the environment and on a command line; and back into a file."""
    config = MemckptConfig(compression=compression)
    assert from_mapping({"compression": yaml.safe_load(text)}) == config
    assert from_mapping(yaml.safe_load(yaml.safe_dump(to_mapping(config)))) == config
    kind, *fields = text.strip("{}").split(", ")
    variables = {"MEMCKPT_COMPRESSION": kind.removeprefix("kind: ")}
    options = ["--memckpt-compression", kind.removeprefix("kind: ")]
    for name, value in (field.split(": ") for field in fields):
        variables[f"MEMCKPT_COMPRESSION_{name.upper()}"] = value
        options += ["--memckpt-compression-" + name.replace("_", "-"), value]
    assert config_from_environment(variables) == config
    assert parse("--run-dir", "x", *options).config == config


WHOLE: list[tuple[type, str, int | None]] = [
    (TopK, "min_elements", None),
    (RandomK, "seed", 1 << 63),
    (Quantized8, "block_elements", (1 << 20) + 1),
    (PowerSGD, "rank", 1025),
    (PowerSGD, "start_seed", 1 << 63),
]


@pytest.mark.parametrize(("kind", "name", "too_large"), WHOLE, ids=lambda value: str(value))
def test_a_number_that_cannot_be_is_named(kind: type, name: str, too_large: int | None) -> None:
    least = 0 if "seed" in name else 1
    assert getattr(kind(**{name: least}), name) == least
    for wrong in (least - 1, "4", 2.0, math.nan, True, None, *([] if too_large is None else [too_large])):
        with pytest.raises(ConfigurationError) as raised:
            kind(**{name: wrong})
        expected = f"compression.{name}: expected a whole number, {least} "
        assert str(raised.value).startswith(expected)
        assert str(raised.value).endswith(f", found {wrong!r}")


@pytest.mark.parametrize("kind", [TopK, RandomK])
@pytest.mark.parametrize("wrong", [0, 1, 1.0, -0.1, 2, math.nan, math.inf, "0.1", True, None, 0.5j], ids=repr)
def test_a_ratio_that_cannot_be_is_named(kind: Any, wrong: Any) -> None:
    expected = f"compression.ratio: expected a number, more than 0, less than 1, found {wrong!r}"
    with pytest.raises(ConfigurationError, match=f"^{re.escape(expected)}$"):
        kind(ratio=wrong)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HalfPrecision(dtype="float16"), "compression.dtype: expected 'bf16' or 'fp16', found 'float16'"),  # type: ignore[arg-type]
        (
            lambda: TopK(residual="forget"),  # type: ignore[arg-type]
            "compression.residual: expected 'auto', 'keep' or 'drop', found 'forget'",
        ),
        (lambda: TopK(error_feedback=1), "compression.error_feedback: expected True or False, found 1"),  # type: ignore[arg-type]
        (lambda: MemckptConfig(compression="topk"), "such as TopK(), or None, found 'topk'"),  # type: ignore[arg-type]
        (lambda: MemckptConfig(compression=TopK), "such as TopK(), or None, found <class "),  # type: ignore[arg-type]
        (lambda: MemckptConfig(compression=LossyConfig()), "such as TopK(), or None, found LossyConfig("),  # type: ignore[arg-type]
        (lambda: MemckptConfig(compression=TopK(), redo="snapshot"), "expected None with redo='snapshot', found TopK("),
        (lambda: MemckptConfig(compression=TopK(), tap="step"), "tap: expected 'auto' with compression, found 'step'"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_named(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        make()


def test_every_compressor_is_a_variant_of_the_setting() -> None:
    """So that none is left out of files, variables, options, Hydra and the tests above."""
    kinds: list[type] = [CompressionConfig]
    for kind in kinds:
        kinds += kind.__subclasses__()
    written = {type(compression) for _, compression in WRITTEN}
    assert set(kinds) == written | {CompressionConfig, LossyConfig, SparseConfig}
    assert all(dataclasses.is_dataclass(kind) for kind in kinds)


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
    ("flags", "environment", "expected"),
    [
        ("peers.kind=erasure peers.ack=proceed", {}, ErasureConfig(ack="proceed")),
        ("peers.kind=erasure peers.rate_bytes_per_second=1e8", {}, ErasureConfig(rate_bytes_per_second=1e8)),
        ("slots=4", {}, None),
        ("slots=4", {"PEERS": "erasure"}, ErasureConfig()),
        ("peers.ack=proceed", {"PEERS": "erasure"}, ErasureConfig(ack="proceed")),
        ("peers=null", {"PEERS": "erasure"}, None),
        ("compression.kind=topk compression.ratio=0.1", {}, TopK(ratio=0.1)),
        ("compression.kind=powersgd", {"COMPRESSION": "topk"}, PowerSGD()),
        ("compression.kind=randomk compression.ratio=0.1", {"COMPRESSION": "topk"}, RandomK(ratio=0.1)),
        ("compression.ratio=0.1", {"COMPRESSION": "randomk"}, RandomK(ratio=0.1)),
        ("compression=null", {"COMPRESSION": "topk"}, None),
    ],
)
def test_a_part_with_variants_of_a_lightning_cli(
    flags: str, environment: dict[str, str], expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(f"MEMCKPT_{name}", value)
    found = _cli_config(flags)
    assert expected == found.compression if "compression" in flags else expected == found.peers


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("peers.kind=erasure peers.copies=4", r"peers\.copies: expected one of data, .*, found 'copies'"),
        ("peers.data=4", r"peers\.kind: expected 'erasure', found none"),
        ("compression.ratio=0.1", r"compression\.kind: expected 'topk' or .*, found none"),
        ("compression.kind=topk compression.ratio=2.0", r"ratio: expected a number, more than 0.*, found 2\.0"),
    ],
)
def test_a_flag_that_cannot_be_is_named_by_a_lightning_cli(flags: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        _cli_config(flags)


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

    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--callback", type=MemCheckpoint)
    written = f"{{class_path: lightning_memckpt.MemCheckpoint, init_args: {{run_dir: run, config: {text}}}}}"
    made = parser.instantiate(parser.parse_args([f"--callback={written}"])).callback
    assert isinstance(made, MemCheckpoint)
    return made.config


def _cli_config(flags: str) -> MemckptConfig:
    """What a MemCheckpointCLI gives to its callback."""
    from lightning.pytorch.demos.boring_classes import BoringModel

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
