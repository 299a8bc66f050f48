"""A store belongs to one run: another one's files are neither read, nor counted, nor deleted."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from memckpt.config import StorageConfig
from memckpt.errors import ConfigurationError, DamagedStateError, ForeignStateError, UsageError
from memckpt.processes.address import AgentAddress
from memckpt.session.resume.storage_tier import StorageTier
from memckpt.state.records import Timeline
from memckpt.storage.catalog import read_catalog
from memckpt.storage.local_store import LocalStore
from memckpt.storage.owner import CLAIM, claim, keep_run, kept_run, new_run, read_claim
from memckpt.storage.retention import leftovers, superseded
from memckpt.storage.store import Store
from tests.support.cluster.thread_ranks import on_ranks
from tests.support.storage.stored_parts import part_of, save_part, start, write
from tests.support.storage.stored_runs import goes_on, stored, until_ordered, until_stored
from tests.support.trainings.cli_harness import exit_status, invoke, invoke_json
from tests.support.trainings.engine_cases import PLAIN
from tests.support.trainings.engine_child import config, kill_both, kill_self
from tests.support.trainings.engine_harness import Lab, collect

T1, T2, T3 = Timeline(1, "a"), Timeline(2, "b"), Timeline(3, "c")


def steps(tier: StorageTier) -> list[int]:
    return [point.step for point in tier.points]


@pytest.fixture
def owned(tmp_path: Path) -> tuple[Path, str]:
    """A store with a checkpoint of step 1 by the run A, and that run's id."""
    place = tmp_path / "shared"
    run = start(place, tmp_path / "A").run
    write(LocalStore(place), part_of(1, run=run))
    return place, run


# At the start of an attempt


@pytest.mark.promise(
    "another run's files in a store are never read, counted or deleted; retention never deletes the checkpoint "
    "after which it runs"
)
def test_a_run_makes_its_id_once_and_claims_its_storage(tmp_path: Path) -> None:
    run = start(tmp_path / "store", tmp_path / "my run").run
    assert run.startswith("my-run-")
    assert kept_run(tmp_path / "my run") == run
    assert read_claim(LocalStore(tmp_path / "store")) == run
    assert start(tmp_path / "store", tmp_path / "my run").run == run
    assert start(tmp_path / "another place", tmp_path / "my run").run == run


@pytest.mark.parametrize("begun", [False, True], ids=["new", "with an id"])
def test_the_store_of_another_run_is_refused_by_name(tmp_path: Path, owned: tuple[Path, str], begun: bool) -> None:
    place, run = owned
    other = start(tmp_path / "elsewhere", tmp_path / "B").run if begun else ""
    with pytest.raises(ForeignStateError) as refused:
        start(place, tmp_path / "B")
    for named in (
        str(place),
        repr(run),
        str(tmp_path / "B"),
        repr(other) if begun else "new",
        "storage.owner",
        "--adopt",
    ):
        assert named in str(refused.value)
    assert kept_run(tmp_path / "B") == other
    assert steps(start(place, tmp_path / "A")) == [1]


@pytest.mark.promise("the store, and no run directory (a new machine)")
def test_a_lost_run_directory_takes_one_setting_once(tmp_path: Path, owned: tuple[Path, str]) -> None:
    place, run = owned
    assert steps(start(place, tmp_path / "A again", owner=run)) == [1]
    assert steps(start(place, tmp_path / "A again")) == [1]


@pytest.mark.promise("run directories that do not outlive a node")
def test_a_run_with_a_name_needs_no_run_directory(tmp_path: Path) -> None:
    """Where nothing outlives a node but its storage."""
    place = tmp_path / "store"
    assert start(place, tmp_path / "pod 1", owner="gpt").run == "gpt"
    write(LocalStore(place), part_of(1, run="gpt"))
    assert steps(start(place, tmp_path / "pod 2", owner="gpt")) == [1]
    with pytest.raises(ForeignStateError, match="belongs to the run 'gpt', and this is the run 'llm'"):
        start(place, tmp_path / "pod 2", owner="llm")
    with pytest.raises(ConfigurationError, match=r"storage.owner: expected a text, not empty, or None, found ''"):
        StorageConfig(owner="")


@pytest.mark.promise("`RUN/storage`, and no `run.json`")
def test_what_lies_in_the_run_directory_is_the_run_s_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = tmp_path / "A" / "storage"
    run = start(place, tmp_path / "A").run
    write(LocalStore(place), part_of(1, run=run))
    (tmp_path / "A").rename(tmp_path / "moved")
    assert steps(start(tmp_path / "moved" / "storage", tmp_path / "moved")) == [1]
    (tmp_path / "moved" / "run.json").unlink()
    assert start(tmp_path / "moved" / "storage", tmp_path / "moved").run == run
    assert f"belongs to the run {run}" in caplog.text
    assert kept_run(tmp_path / "moved") == run


@pytest.mark.promise("a store that a run without storage was saved to by hand")
def test_a_store_without_an_owner_becomes_that_of_the_first_who_comes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As a run without storage has left it, which was saved there by hand."""
    place = tmp_path / "store"
    write(LocalStore(place), part_of(1))
    tier = start(place, tmp_path / "A")
    assert steps(tier) == [1]
    assert f"belonged to no run, and now does to {tier.run}" in caplog.text
    with pytest.raises(ForeignStateError, match=f"belongs to the run '{tier.run}'"):
        start(place, tmp_path / "B")


def test_commit_files_tell_whose_a_store_is_that_was_never_claimed(tmp_path: Path, owned: tuple[Path, str]) -> None:
    """The claim could not be written, or its file is damaged: it is made up for."""
    place, run = owned
    for content in (None, b"{"):
        (place / CLAIM).unlink()
        if content is not None:
            (place / CLAIM).write_bytes(content)
        with pytest.raises(ForeignStateError, match=f"belongs to the run '{run}'"):
            start(place, tmp_path / "B")
        assert steps(start(place, tmp_path / "A")) == [1]
        assert read_catalog(LocalStore(place)).claimed


@pytest.mark.promise("nodes that do not share a run directory")
def test_nodes_agree_on_the_run(tmp_path: Path) -> None:
    """Their run directories are their own; one is new, and one is of a run that was there before."""
    keep_run(tmp_path / "1", "kept")
    config = StorageConfig(url=str(tmp_path / "store"))
    tiers = on_ranks(3, lambda ranks: StorageTier(config, tmp_path / str(ranks.rank), ranks, None))
    assert [tier.run for tier in tiers] == ["kept"] * 3
    assert [kept_run(tmp_path / str(rank)) for rank in range(3)] == ["kept"] * 3
    keep_run(tmp_path / "0", "another")
    tiers = on_ranks(3, lambda ranks: StorageTier(config, tmp_path / str(ranks.rank), ranks, None))
    assert [tier.run for tier in tiers] == ["kept"] * 3, "the store is that of one of them"


def test_a_damaged_id_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")
    said = r"run.json in .*: expected the run's id, found something else .* Remove"
    with pytest.raises(DamagedStateError, match=said):
        kept_run(tmp_path)


def test_of_many_who_claim_at_once_one_wins(tmp_path: Path) -> None:
    runs = [new_run(tmp_path) for _ in range(16)]
    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(lambda run: claim(LocalStore(tmp_path), run), runs))
    assert [run for run, has in zip(runs, won, strict=True) if has] == [read_claim(LocalStore(tmp_path))]
    assert LocalStore(tmp_path).find("", unfinished=True) == [CLAIM]


def test_a_claim_is_written_once_everywhere(store: Store) -> None:
    assert claim(store, "A")
    assert not claim(store, "B")
    assert read_claim(store) == "A"


def test_the_files_of_others_count_for_nothing(store: Store) -> None:
    """Both began at once, where nothing could keep them apart."""
    claim(store, "B")
    write(store, part_of(1, timeline=T1, run="A"))
    half = part_of(2, timeline=T1, run="A")
    store.write(half.state_path, b"on its way")
    begun = part_of(1, timeline=T3, run="A")
    store.write(begun.state_path, b"on its way")
    write(store, part_of(5, timeline=T2, run="B"))
    own_half = part_of(4, timeline=T2)
    store.write(own_half.state_path, b"left over")
    catalog = read_catalog(store)
    assert (catalog.owner, catalog.others) == ("B", ("A",))
    assert [one.record for one in catalog.checkpoints] == [5]
    assert leftovers(catalog, "node", ()) == [own_half.state_path]


# The writer


@pytest.mark.parametrize("run", ["B", ""])
def test_nothing_is_written_to_the_store_of_another_run(owned: tuple[Path, str], run: str) -> None:
    """Wherever it is that somebody wants a copy of live state, and if a store was given away while training ran."""
    place, _ = owned
    before = LocalStore(place).find("", unfinished=True)
    with pytest.raises(ForeignStateError):
        save_part(place, part_of(2, timeline=T2, run=run))
    assert LocalStore(place).find("", unfinished=True) == before


def test_retention_never_deletes_what_it_was_called_for(owned: tuple[Path, str]) -> None:
    """Though a later attempt has been there: the job has moved back to what an earlier one left."""
    place, run = owned
    for record in (2, 3):
        write(LocalStore(place), part_of(record, timeline=T2, run=run))
    late = part_of(4, timeline=T1, run=run)
    save_part(place, late)
    assert [(one.timeline, one.record) for one in read_catalog(LocalStore(place)).complete] == [(T2, 3), (T1, 4)]


def test_what_retention_was_called_for_counts_like_any_other(tmp_path: Path) -> None:
    for record in (1, 2, 3):
        write(LocalStore(tmp_path), part_of(record))
    found = read_catalog(LocalStore(tmp_path)).checkpoints
    gone = [one.record for one in superseded(found, 2, None, found[0].parts["node"])]
    assert gone == [one.record for one in superseded(found, 2, None)] == [1]


# The command line


def test_ls_lists_the_store_of_another_run_and_says_so(tmp_path: Path, owned: tuple[Path, str]) -> None:
    place, run = owned
    assert invoke_json("ls", tmp_path / "anywhere", "--url", place)[1]["owner"] == run
    keep_run(tmp_path / "B", "B-1")
    code, text = invoke("ls", tmp_path / "B", "--url", place)
    assert code == 0
    assert run in text


Command = Callable[[Path], list[object]]
CHANGING: dict[str, Command] = {
    "verify": lambda to: ["verify", "--repair"],
    "export": lambda to: ["export", "--format", "dcp", "--to", to],
}


@pytest.mark.parametrize("command", CHANGING.values(), ids=CHANGING)
def test_commands_refuse_the_store_of_another_run_and_adopt_it(
    tmp_path: Path, owned: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    place, run = owned
    keep_run(tmp_path / "B", "B-1")
    what = [*command(tmp_path / "exported"), tmp_path / "B", "--url", place]
    assert exit_status(monkeypatch, *what) == ForeignStateError.exit_code
    assert kept_run(tmp_path / "B") == "B-1"
    assert exit_status(monkeypatch, *what, "--adopt") == 0
    assert kept_run(tmp_path / "B") == run
    assert steps(start(place, tmp_path / "B")) == [1]


@pytest.mark.promise("a store that was copied or moved, and another run directory")
def test_a_new_directory_adopts_a_store_with_one_flag(tmp_path: Path, owned: tuple[Path, str]) -> None:
    place, _ = owned
    assert invoke("ls", tmp_path / "new", "--url", place, "--adopt")[0] == 0
    assert steps(start(place, tmp_path / "new")) == [1]


def test_what_belongs_to_no_run_cannot_be_adopted(tmp_path: Path) -> None:
    write(LocalStore(tmp_path / "store"), part_of(1))
    with pytest.raises(UsageError, match="expected a store that belongs to a run"):
        invoke("ls", tmp_path / "new", "--url", tmp_path / "store", "--adopt")


def test_status_shows_that_the_store_is_another_run_s(tmp_path: Path, owned: tuple[Path, str]) -> None:
    place, run = owned
    keep_run(tmp_path / "B", "B-1")
    with pytest.raises(ForeignStateError, match=f"belongs to the run '{run}'"):
        invoke("status", tmp_path / "B", "--url", place)


# Whole runs


@pytest.mark.promise("two runs with one `storage.url`")
def test_two_runs_with_one_storage_keep_apart(lab: Lab, tmp_path: Path) -> None:
    """The second is refused at its start; the first resumes from its own."""
    settings = stored("lazy", url=str(tmp_path / "shared"))
    actions = {("after commit", 3): until_ordered, ("after commit", 8): until_stored(5), ("backward", 9): kill_both}
    died = lab.train(PLAIN, settings, actions=actions)
    refused = collect(*lab.begin(PLAIN, settings, run_dir=tmp_path / "second", seed=2))
    assert refused.code == 3
    assert "ForeignStateError" in refused.log
    assert refused.losses == {}
    # Its agent was started for nothing, and does not wait for its linger time.
    serving = AgentAddress.of(tmp_path / "second").serving()
    assert serving is None or serving.ends(20.0)
    final = lab.train(PLAIN, settings, seed=3)
    assert final.restored_step == 5
    assert final.of("restored")[0]["lost"] is None, "nobody is left who knows"
    lab.check_same(PLAIN, died, final)


@pytest.mark.promise("a copy of a run directory")
def test_a_copy_of_a_run_trains_for_itself(lab: Lab) -> None:
    """Its address file was copied as well, and names the agent of the original."""
    settings, copy = config("lazy"), lab.directory / "copy"
    lab.start_agent()
    died = lab.train(PLAIN, settings, actions={("backward", 9): kill_self})
    shutil.copytree(lab.run_dir, copy)
    other = lab.train(PLAIN, settings, run_dir=copy, actions={("backward", 12): kill_self})
    assert other.restored_step is None
    assert f"{copy} is a copy of {lab.run_dir}" in other.log
    lab.stop(copy)
    goes_on(lab, settings, died, 8)


@pytest.mark.promise("a run directory that was moved, with `storage` in it")
def test_a_run_that_was_moved_goes_on_with_its_agent(lab: Lab) -> None:
    """What the agent writes from then on goes to where the run is."""
    settings, moved = stored("lazy", every_steps=None), lab.directory / "moved"
    lab.start_agent()
    died = lab.train(PLAIN, config("lazy"), actions={("backward", 9): kill_self})
    lab.run_dir.rename(moved)
    final = lab.train(PLAIN, settings, run_dir=moved, seed=2)
    assert final.restored_step == 8
    assert "local memory" in final.log
    lab.check_same(PLAIN, died, final)
    assert not lab.run_dir.exists()
    assert read_catalog(LocalStore(moved / "storage")).complete
