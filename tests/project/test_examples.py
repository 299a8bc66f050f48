"""Each example, as a user runs it, killed and started again: it ends with the weights of an undisturbed run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.script_runs import Scripts

LOCAL = ("--memckpt-storage", "off", "--memckpt-agent-linger-seconds", "60", "--memckpt-redo", "lazy")


@pytest.fixture(scope="session")
def _examples_imported() -> None:
    """Before the lab's children are forked: they need not import it again. Trains nothing."""
    import transformers.models.gpt2.modeling_gpt2
    import transformers.trainer  # noqa: F401


@pytest.fixture
def scripts(_examples_imported: None, lab: Lab) -> Iterator[Scripts]:
    return Scripts(lab)


VARIABLES = {"MEMCKPT_STORAGE": "none", "MEMCKPT_REDO": "lazy", "MEMCKPT_AGENT_LINGER_SECONDS": "60"}
#: Arguments of each, and the lines at which it is killed; those that take no settings get them from the environment.
EXAMPLES: dict[str, tuple[tuple[str, ...], list[str]]] = {
    "lightning_gpt.py": (("--run-dir", "run", "--steps", "12", *LOCAL), ["step 7"]),
    "plain_loop.py": (("run", "--size", "tiny", "--steps", "12"), ["step 7"]),
    "digits_cnn.py": (("--run-dir", "run", "--epochs", "2", *LOCAL), ["epoch 0"]),
    "transformers_trainer.py": (("--run-dir", "run", "--steps", "12", *LOCAL), ["step 7"]),
    # Two batches a step, five steps an epoch.
    "fabric_gpt.py": (("run", "--windows", "80", "--epochs", "2"), ["step 3", "step 8"]),
}
OFTEN = ("lightning_gpt.py", "plain_loop.py")


@pytest.mark.promise("each example, killed and restarted, ends with the weights of an uninterrupted run")
@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in EXAMPLES]
)
def test_an_example_survives(scripts: Scripts, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    arguments, kills = EXAMPLES[name]
    if LOCAL[0] not in arguments:
        for variable, value in VARIABLES.items():
            monkeypatch.setenv(variable, value)
    logs = scripts.survives(f"examples/{name}", *arguments, kills=kills)
    assert name != "digits_cnn.py" or "epoch 1: accuracy 0." in logs[-1]


@pytest.mark.promise("a script of two phases, killed in each and restarted, ends as an undisturbed one")
def test_two_phases_go_on_where_they_were(scripts: Scripts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMCKPT_AGENT_LINGER_SECONDS", "60")
    logs = scripts.survives("examples/two_phases.py", "runs", kills=["pretrain step 11", "finetune step 3"])
    assert "pretrain step 16" in logs[1]
    assert "pretrain step" not in logs[2], "its final step is in storage"
    assert "pretrain: resumed at step 16 from" in logs[2]
