"""`memckpt export --format torch_checkpointing`: what comes out is loaded by its own manager."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import memckpt
from memckpt.storage.export import ExportedState

manager_of = pytest.importorskip("torch_checkpointing", reason="needs torch 2.11").CheckpointManager


def trained(optimizers: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """A model with a tied weight, after two steps of so many optimizers."""
    torch.manual_seed(optimizers)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    made = [torch.optim.AdamW(model.parameters(), lr=0.1 * (number + 1)) for number in range(optimizers)]
    for _ in range(2):
        model(torch.ones(2, 4)).square().sum().backward()
        for each in made:
            each.step()
    return model, list(made)


@pytest.mark.parametrize("optimizers", [1, 2])
def test_an_exported_step_is_what_its_manager_loads(optimizers: int, tmp_path: Path) -> None:
    from memckpt_tools.formats import write_torch_checkpointing

    model, made = trained(optimizers)
    state = ExportedState(7, model.state_dict(), [each.state_dict() for each in made], {})
    write_torch_checkpointing(state, tmp_path / "out")

    torch.manual_seed(9)
    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    other[1].weight = other[0].weight
    names = ["optimizer", "optimizer_1"][:optimizers]
    items = dict.fromkeys([*names, "step"]) | {"model": other.state_dict()}
    manager = manager_of()
    try:
        found = dict(manager.load(str(tmp_path / "out"), into=items))
    finally:
        manager.close()
    assert found["step"] == 7
    other.load_state_dict(found["model"])
    for name, parameter in model.named_parameters():
        assert torch.equal(other.get_parameter(name), parameter)
    for name, each in zip(names, made, strict=True):
        loaded = torch.optim.AdamW(other.parameters(), lr=1.0)
        loaded.load_state_dict(found[name])
        torch.testing.assert_close(loaded.state_dict(), each.state_dict(), rtol=0, atol=0)


def test_a_run_starts_from_its_checkpoint_by_the_lines_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memckpt_tools.formats import write_torch_checkpointing

    model, (optimizer,) = trained(1)
    write_torch_checkpointing(ExportedState(7, model.state_dict(), [optimizer.state_dict()], {}), tmp_path / "out")
    page = (Path(__file__).parents[2] / "docs/runs.md").read_text()
    lines = page.partition("# of torch_checkpointing\n")[2].partition("```")[0]
    assert lines.count("\n") == 4
    other, _ = trained(0)
    names = {
        "CheckpointManager": manager_of,
        "model": other,
        "optimizer": torch.optim.AdamW(other.parameters(), lr=1.0),
    }
    monkeypatch.chdir(tmp_path)
    exec(lines, names)
    torch.testing.assert_close(dict(other.named_parameters()), dict(model.named_parameters()), rtol=0, atol=0)
    config = memckpt.MemckptConfig(storage=None, agent=memckpt.AgentConfig(linger_seconds=60))
    found = names["optimizer"]
    with memckpt.attach(other, found, run_dir=tmp_path / "run", config=config) as session:
        assert session.restore() is None
        for one, net in ((found, other), (optimizer, model)):
            one.zero_grad()
            net(torch.ones(2, 4)).square().sum().backward()
            one.step()
        session.commit()
    torch.testing.assert_close(dict(other.named_parameters()), dict(model.named_parameters()), rtol=0, atol=0)
