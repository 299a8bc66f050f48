"""The commands that look at what a run has in storage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from memckpt.cli.main import app
from memckpt.errors import DamagedStateError, NothingHeldError
from memckpt.storage.store import LocalStore, open_store
from tests.conftest import Bucket
from tests.test_storage import part_of, write

Invoke = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with the checkpoints of steps 1 and 2."""
    store = LocalStore(tmp_path / "run" / "storage")
    for record in (1, 2):
        write(store, part_of(record))
    return tmp_path / "run"


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, [*arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def damage(run: Path, record: int) -> None:
    part = part_of(record)
    path = run / "storage" / part.base_directory / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_ls_shows_what_is_there(run: Path) -> None:
    code, text = invoke("ls", str(run), "--json")
    found = json.loads(text)
    assert code == 0
    assert [one["step"] for one in found["checkpoints"]] == [2, 1]
    assert all(one["complete"] for one in found["checkpoints"])
    assert "step" in invoke("ls", str(run))[1]


def test_nothing_there_is_an_error(tmp_path: Path) -> None:
    for command in ("ls", "verify"):
        with pytest.raises(NothingHeldError, match="no checkpoints in"):
            invoke(command, str(tmp_path))


def test_verify_finds_damage_and_repairs(run: Path) -> None:
    assert invoke("verify", str(run))[0] == 0
    damage(run, 2)
    code, text = invoke("verify", str(run), "--json")
    assert code == DamagedStateError.exit_code
    assert json.loads(text)["good"] == 1
    assert "step 2, attempt 1" in json.loads(text)["damaged"]
    assert invoke("verify", str(run), "--repair")[0] == 0
    assert invoke("verify", str(run))[0] == 0
    assert [one["step"] for one in json.loads(invoke("ls", str(run), "--json")[1])["checkpoints"]] == [1]


def test_a_damaged_checkpoint_is_not_exported(run: Path, tmp_path: Path) -> None:
    damage(run, 2)
    with pytest.raises(DamagedStateError, match="step 2 is damaged"):
        invoke("export", str(run), "--to", str(tmp_path / "out.pt"))
    code, _ = invoke("export", str(run), "--step", "1", "--format", "dcp", "--to", str(tmp_path / "out"))
    assert code == 0
    state = {"model.weight": torch.zeros(2, 3)}
    torch.distributed.checkpoint.load(state, checkpoint_id=str(tmp_path / "out"), no_dist=True)
    assert torch.equal(state["model.weight"], torch.arange(6.0).view(2, 3) + 1)


def test_an_object_store_is_named_by_its_url(bucket: Bucket, tmp_path: Path) -> None:
    store = open_store(bucket.url)
    for record in (1, 2):
        write(store, part_of(record))
    code, text = invoke("ls", str(tmp_path), "--url", bucket.url, "--json")
    assert code == 0
    assert [one["step"] for one in json.loads(text)["checkpoints"]] == [2, 1]
    path = part_of(2).base_directory + "/__0_0.distcp"
    store.write(path, store.read(path)[:-1])
    assert invoke("verify", str(tmp_path), "--url", bucket.url)[0] == DamagedStateError.exit_code
    assert invoke("verify", str(tmp_path), "--url", bucket.url, "--repair")[0] == 0
    assert not [key for key in bucket.objects() if "000000000002" in key]
    arguments = ["--format", "dcp", "--to", str(tmp_path / "out")]
    assert invoke("export", str(tmp_path), "--url", bucket.url, *arguments)[0] == 0
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == [".metadata", "__0_0.distcp"]
