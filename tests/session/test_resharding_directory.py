"""Other ranks without storage: the survivors' checkpoint is named as what it is, and not as the user's storage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from memckpt.config import StorageConfig
from memckpt.errors import DamagedStateError
from memckpt.session.resume.storage_tier import StorageTier
from memckpt.storage.local_store import LocalStore
from tests.support.cluster.sharded_cases import Setup, job_of
from tests.support.cluster.sharded_job import plain, rows, train
from tests.support.cluster.thread_ranks import on_ranks
from tests.support.trainings.engine_child import config
from tests.support.trainings.engine_harness import Lab
from tests.support.trainings.killed_ranks import Death, fresh_directory, logs, noted, run

AT = 6
NAME = "resharding/ in the run directory"


def test_a_start_with_fewer_ranks_names_the_survivors_checkpoint(lab: Lab) -> None:
    died = job_of(lab, Setup(world_size=2), config("lazy", storage=None), deaths=[Death("all", AT - 1, "committed")])
    assert run(lab, died) == [-9, -9]
    before = logs(lab)
    job = replace(died, setup=Setup("plain", 1), directory=fresh_directory(lab), number=1, deaths=(), last_step=AT)
    assert run(lab, job) == [0], logs(lab)[-6000:]
    said = logs(lab).removeprefix(before)
    assert f"record {AT} goes to {NAME} first" in said
    assert f"resuming from {NAME} at step {AT}: memory holds a run" in said
    assert [each["tier"] for rank in noted(job, "restored") for each in rank] == [NAME]
    assert "storage" not in said
    assert died.run_dir is not None
    assert not (died.run_dir / "resharding").exists()


@pytest.mark.parametrize(("owned", "name"), [(True, "storage"), (False, NAME)])
def test_damage_is_told_of_the_store_in_which_it_is(tmp_path: Path, owned: bool, name: str) -> None:
    store = LocalStore(tmp_path)
    train(store, rows(1), 1, base_at=2, last=2)
    live = plain()

    def resume(ranks: object) -> None:
        tier = StorageTier(StorageConfig(url=str(tmp_path)), tmp_path, ranks, None, owned=owned)  # type: ignore[arg-type]
        for file in tier.points[0].files:
            (tmp_path / file.path).write_bytes(b"")
        with pytest.raises(DamagedStateError, match=f"^no checkpoint in {name} is whole: step 2: "):
            tier.open_newest(tier.points, live.spec(0, 1))

    on_ranks(1, resume)
