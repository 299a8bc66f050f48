"""Sharded checkpoints in other hands: torch's own, exports, and the command line."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import memckpt
from memckpt.state.tensors import local, shard_of
from memckpt.storage.catalog import read_catalog
from memckpt.storage.local_store import LocalStore
from tests.support.cluster.mesh import all_empty
from tests.support.cluster.sharded_job import PARAMS, WHOLE, Box, Stored, rows, train
from tests.support.trainings.cli_harness import invoke, invoke_json
from tests.support.trainings.engine_harness import Lab

STEPPED = [name for name in PARAMS if name in WHOLE]


def names_in_store() -> dict[str, str]:
    """What tensors are called, and what :func:`tests.support.cluster.sharded_job.check` calls them."""
    found = {f"model.{name}": name for name in WHOLE}
    for name in STEPPED:
        found |= {f"optimizers.0.{name}.{key}": f"{name}.{key}" for key in ("exp_avg", "exp_avg_sq")}
    return found


# torch.distributed.checkpoint


def load_with_torch(directory: Path, checkpoint: Path, expected: Mapping[str, torch.Tensor], rank: int) -> None:
    """One of three ranks: DTensors of any kind, and a model as FSDP2 has it."""
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=3, timeout=timedelta(seconds=60)
    )
    mesh = init_device_mesh("cpu", (3,))
    named = names_in_store()
    shapes = {key: WHOLE[name.partition(".")[0]] for key, name in named.items()}
    for cut in (0, 1, None):
        tensors: dict[str, Any] = dict(all_empty(shapes, mesh, (cut,)))
        stock.load(tensors, checkpoint_id=checkpoint)
        for key, tensor in tensors.items():
            shard = shard_of(tensor)
            box = Box(shard.offsets, tuple(local(tensor).shape))
            assert torch.equal(local(tensor), box.of(expected[named[key]])), key
    model = nn.Module()
    for name in ("w", "v", "b"):
        model.register_parameter(name, nn.Parameter(torch.zeros(WHOLE[name])))
    fully_shard(model, mesh=mesh)
    state = {"model": model.state_dict()}
    stock.load(state, checkpoint_id=checkpoint)
    model.load_state_dict(state["model"])
    for name, param in model.named_parameters():
        assert torch.equal(param.full_tensor(), expected[name]), name  # type: ignore[attr-defined]
    dist.destroy_process_group()


@pytest.mark.promise("stock `torch.distributed.checkpoint` reads a sharded checkpoint")
def test_torch_loads_it_on_other_ranks(lab: Lab, tmp_path: Path) -> None:
    job = train(LocalStore(tmp_path / "storage"), rows(2), 2)
    directory = tmp_path / "storage" / read_catalog(job.store).checkpoints[0].directory
    children = [
        lab.fork(lambda rank=rank: load_with_torch(tmp_path, directory, job.wholes[2], rank), f"rank{rank}")
        for rank in range(3)
    ]
    assert [child.wait(60) for child in children] == [0, 0, 0], [child.log.read_text() for child in children]


@pytest.mark.parametrize("boxes", [None, rows(1)], ids=["plain", "one-rank"])
def test_torch_loads_what_one_node_has_written(tmp_path: Path, boxes: Any) -> None:
    """The whole checkpoint, and the node's own directory."""
    job = train(LocalStore(tmp_path), boxes, 1)
    (checkpoint,) = read_catalog(job.store).checkpoints
    for directory in (checkpoint.directory, checkpoint.parts["n0"].base_directory):
        state = {"model": {name: torch.zeros(shape) for name, shape in WHOLE.items()}}
        stock.load(state, checkpoint_id=tmp_path / directory, no_dist=True)
        for name, tensor in state["model"].items():
            assert torch.equal(tensor, job.wholes[2][name]), name


def test_what_is_private_to_ranks_is_there_for_each(tmp_path: Path) -> None:
    job = train(LocalStore(tmp_path), rows(2), 2)
    (checkpoint,) = read_catalog(job.store).checkpoints
    for index, prefix in enumerate(("", "ranks.1.")):
        expected = {
            f"{prefix}model.scale": job.plains[2, index]["scale"],
            f"{prefix}optimizers.0.scale.exp_avg": job.plains[2, index]["scale.exp_avg"],
            f"{prefix}optimizers.0.w.step": torch.tensor(2.0),
            f"{prefix}model.count": torch.tensor(200.0 + index),
        }
        found = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
        stock.load(found, checkpoint_id=tmp_path / checkpoint.directory, no_dist=True)
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name


# Exports


@pytest.fixture(params=[2, 4], ids=["checkpoint", "redone"])
def exported(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Stored, int]:
    """Training of which the step of that number is exported."""
    return train(LocalStore(tmp_path / "run" / "storage"), rows(3), 3, last=4), request.param


def export(tmp_path: Path, step: int, form: str) -> Path:
    target = tmp_path / "out"
    code, said = invoke("export", tmp_path / "run", "--to", target, "--step", step, "--format", form)
    assert code == 0, said
    return target


def test_an_export_has_whole_tensors(exported: tuple[Stored, int], tmp_path: Path) -> None:
    job, step = exported
    found = torch.load(export(tmp_path, step, "torch"), weights_only=True)
    whole = job.wholes[step] | job.plains[step, 0]
    assert found["step"] == step
    assert found["model"].pop("count") == 100 * step
    assert set(found["model"]) == {*WHOLE, "scale"}
    for name, tensor in found["model"].items():
        assert torch.equal(tensor, whole[name]), name
    optimizer = torch.optim.Adam([nn.Parameter(found["model"][name]) for name in PARAMS], lr=1.0)
    optimizer.load_state_dict(found["optimizers"][0])
    assert optimizer.param_groups[0]["lr"] == 0.1
    for name, param in zip(PARAMS, optimizer.param_groups[0]["params"], strict=True):
        for key, value in optimizer.state[param].items():
            assert torch.equal(value, whole[f"{name}.{key}"]), (name, key)


def test_a_script_gets_a_step_as_values(exported: tuple[Stored, int], tmp_path: Path) -> None:
    job, step = exported
    before = sorted((tmp_path / "run").rglob("*"))
    found = memckpt.load(tmp_path / "run", step)
    assert found.step == step
    assert memckpt.load(str(tmp_path / "run")).step == 4, "the newest, of which the log has the last records"
    for name, tensor in (job.wholes[step] | job.plains[step, 0]).items():
        if name in found.model:
            assert torch.equal(found.model[name], tensor), name
    assert {*WHOLE, "scale", "count"} == set(found.model)
    assert found.optimizers[0]["param_groups"][0]["lr"] == 0.1
    assert sorted((tmp_path / "run").rglob("*")) == before, "nothing is left there"
    with pytest.raises(memckpt.MemckptError, match="the storage has, 2, 4, found step 7"):
        memckpt.load(tmp_path / "run", 7)


def test_a_safetensors_export_has_the_model(exported: tuple[Stored, int], tmp_path: Path) -> None:
    job, step = exported
    found = load_file(export(tmp_path, step, "safetensors"))
    assert torch.equal(found["w"], job.wholes[step]["w"])
    assert set(found) == {*WHOLE, "scale", "count"}


def test_a_dcp_export_is_a_checkpoint_of_its_own(exported: tuple[Stored, int], tmp_path: Path) -> None:
    job, step = exported
    target = export(tmp_path, step, "dcp")
    named = names_in_store()
    tensors = {key: torch.empty_like(job.wholes[step][name]) for key, name in named.items()}
    stock.load(tensors, checkpoint_id=target, no_dist=True)
    for key, name in named.items():
        assert torch.equal(tensors[key], job.wholes[step][name]), key


def test_the_command_line_knows_parts(tmp_path: Path) -> None:
    job = train(LocalStore(tmp_path / "run" / "storage"), rows(3), 3, last=4)
    code, listed = invoke_json("ls", tmp_path / "run")
    assert code == 0
    assert (listed["step"], listed["checkpoints"][0]["nodes"]) == (4, ["n0", "n1", "n2"])
    assert invoke_json("verify", tmp_path / "run")[1]["good"] == 1
    checkpoint = read_catalog(job.store).checkpoints[0]
    job.store.delete(checkpoint.parts["n1"].commit_path)
    code, listed = invoke_json("ls", tmp_path / "run")
    assert [one["complete"] for one in listed["checkpoints"]] == [False]
    assert invoke_json("verify", tmp_path / "run")[1]["unfinished"] == [2]
