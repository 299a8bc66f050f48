"""Each example, as a user runs it, killed and started again: it ends with the weights of an undisturbed run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.script_runs import ROOT, Scripts

LOCAL = ("--memckpt-storage", "off", "--memckpt-agent-linger-seconds", "60", "--memckpt-redo", "lazy")


@pytest.fixture(scope="session")
def _examples_imported() -> None:
    """Before the lab's children are forked: they need not import it again. Trains nothing."""
    import transformers.models.gpt2.modeling_gpt2
    import transformers.trainer  # noqa: F401


@pytest.fixture
def scripts(_examples_imported: None, lab: Lab) -> Iterator[Scripts]:
    return Scripts(lab)


@pytest.mark.promise("each example, killed and restarted, ends with the weights of an uninterrupted run")
def test_lightning_gpt(scripts: Scripts) -> None:
    arguments = ("--run-dir", "run", "--steps", "12", *LOCAL)
    scripts.survives("examples/lightning_gpt.py", *arguments, kills=["step 7"])


@pytest.mark.slow
def test_digits_cnn(scripts: Scripts) -> None:
    arguments = ("--run-dir", "run", "--epochs", "2", *LOCAL)
    logs = scripts.survives("examples/digits_cnn.py", *arguments, kills=["epoch 0"])
    assert "epoch 1: accuracy 0." in logs[-1]


@pytest.mark.slow
def test_transformers_trainer(scripts: Scripts) -> None:
    arguments = ("--run-dir", "run", "--steps", "12", *LOCAL)
    scripts.survives("examples/transformers_trainer.py", *arguments, kills=["step 7"])


def test_plain_loop(scripts: Scripts, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"STORAGE": "none", "REDO": "lazy", "AGENT_LINGER_SECONDS": "60"}.items():
        monkeypatch.setenv(f"MEMCKPT_{name}", value)
    scripts.survives("examples/plain_loop.py", "run", "--size", "tiny", "--steps", "12", kills=["step 7"])


@pytest.mark.slow
def test_fabric_gpt(scripts: Scripts, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"STORAGE": "none", "REDO": "lazy", "AGENT_LINGER_SECONDS": "60"}.items():
        monkeypatch.setenv(f"MEMCKPT_{name}", value)
    arguments = ("run", "--windows", "80", "--epochs", "2")  # two batches a step, five steps an epoch
    scripts.survives("examples/fabric_gpt.py", *arguments, kills=["step 3", "step 8"])


def test_every_example_has_a_test_here_or_elsewhere() -> None:
    scripts = {each.name for each in (ROOT / "examples").glob("*.py")}
    here = {"lightning_gpt.py", "digits_cnn.py", "transformers_trainer.py", "plain_loop.py", "fabric_gpt.py"}
    elsewhere = {"train.py", "accelerate_gpt.py", "lost_node.py", "many_nodes.py"}
    assert scripts == here | elsewhere | {"__init__.py", "common.py", "digest.py", "gpt.py"}
