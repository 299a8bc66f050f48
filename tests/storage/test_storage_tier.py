"""What ranks find in storage at a resume: they share the reading, and agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memckpt.config import StorageConfig
from memckpt.errors import DamagedStateError
from memckpt.session.resume import storage_tier
from memckpt.session.resume.storage_tier import StorageTier
from memckpt.storage.local_store import LocalStore
from memckpt.storage.store import Store, StoredFile, matches
from tests.support.cluster.sharded_job import Live, check, plain, rows, train
from tests.support.cluster.thread_ranks import on_ranks


@pytest.mark.parametrize("damaged", range(3))
def test_ranks_share_the_checking_and_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: int) -> None:
    """Whichever rank comes upon the damage, all pass over the same states, and every file is read once."""
    store = LocalStore(tmp_path)
    for record in (2, 3):
        job = train(store, rows(3), 3, base_at=record, last=record)
    read: list[str] = []

    def noting(store: Store, file: StoredFile) -> str | None:
        read.append(file.path)
        return matches(store, file)

    monkeypatch.setattr(storage_tier, "matches", noting)
    config = StorageConfig(url=str(tmp_path))

    def resume(ranks: Any) -> tuple[int, Live]:
        tier = StorageTier(config, tmp_path, ranks, None)
        live = plain()
        stored = tier.open_newest(tier.points, live.spec(0, 1))
        stored.restore(live.tensors, live.optimizers)
        return stored.point.record, live

    for step, (record, live) in enumerate(on_ranks(3, resume)):
        assert record == 3, step
        check(live, job, 3)
    assert len(read) == len(set(read)) == 9  # two files of tensors and one with the rest, of three parts
    part = job.point(3).checkpoint.parts[f"n{damaged}"]
    path = tmp_path / part.base_directory / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])
    assert [record for record, _ in on_ranks(3, resume)] == [2, 2, 2]
    older = tmp_path / part.base_directory.replace("000000000003", "000000000002") / ".metadata"
    older.write_bytes(b"")
    with pytest.raises(DamagedStateError, match=r"no checkpoint in storage is whole: step 3: .*; step 2: "):
        on_ranks(3, resume)
