"""``memckpt pin``, ``rm`` and ``gc``: manual retention in a run's storage; training may go on."""

from __future__ import annotations

import select
import time
from pathlib import Path
from typing import Annotated

import typer

from memckpt.cli.common import AsJson, Node, Run, Url, count, err, out, print_json, store_of
from memckpt.cli.run_view import Adopt, catalog_of, check_owner, checkpoint_name
from memckpt.errors import MemckptError, NothingHeldError, UsageError
from memckpt.processes.address import AgentAddress
from memckpt.processes.control import ask_status
from memckpt.storage.catalog import PINNED, Catalog, Checkpoint, read_keys, remove, still_there, write_keys
from memckpt.storage.local_store import LocalStore
from memckpt.storage.owner import INSIDE, kept_run, place_of_store, refuse_other
from memckpt.storage.retention import delete, find_garbage, only_on
from memckpt.storage.store import Store
from memckpt.user_messages import nbytes_text

OfStep = Annotated[int, typer.Argument(help="The step of a checkpoint, as `memckpt ls` shows it.")]
Off = Annotated[bool, typer.Option("--off", help="Remove the pin.")]
Force = Annotated[bool, typer.Option("--force", help="Delete it even if pinned, or if other steps are lost with it.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="List what would be deleted, and delete nothing.")]
#: Seconds to wait for a writer that started before the pin.
_WRITER_SECONDS = 60.0
#: Seconds without a change after which an uncommitted file is abandoned; more than `storage.timeout_seconds`.
_ABANDONED_SECONDS = 3600.0


def _open(run: Path, url: str | None, adopt: bool) -> tuple[Store, Catalog]:
    """Open a store that the run owns. Raises ForeignStateError if another run does."""
    store = store_of(run, url)
    catalog = catalog_of(store, run)
    check_owner(store, catalog, run, adopt)
    if place_of_store(store, run) != INSIDE:
        refuse_other(store.url, catalog.owner, kept_run(run), run)
    return store, catalog


def _chosen(catalog: Catalog, step: int) -> Checkpoint:
    """The newest checkpoint of a step."""
    for one in catalog.checkpoints:
        if one.step == step:
            return one
    steps = sorted({one.step for one in catalog.checkpoints})
    logged = any(step in batch.steps for batch in catalog.batches)
    hint = f"; step {step} is in the log only, from where `memckpt export --step {step}` brings it" if logged else ""
    raise NothingHeldError(f"expected a checkpoint of step {step}, found those of the steps {steps}{hint}")


def pin(
    run: Run,
    step: OfStep,
    off: Off = False,
    node: Node = None,
    url: Url = None,
    adopt: Adopt = False,
    as_json: AsJson = False,
) -> None:
    """Keep a checkpoint from retention, until --off.

    It is kept in addition to the `storage.keep_last` newest ones, and `rm` refuses to delete it. Exit status 4 if there
    is no such checkpoint, 5 if the store belongs to another run.
    """
    store, catalog = _open(run, url, adopt)
    one = _chosen(catalog, step)
    if not off and not one.complete:
        raise NothingHeldError(f"step {step} is incomplete: it has only the parts of {', '.join(sorted(one.parts))}")
    there = {other.key for other in catalog.checkpoints}
    pins = (read_keys(store, PINNED) & there) - {one.key} | (set() if off else {one.key})
    write_keys(store, PINNED, pins)
    if not off:
        _let_writer_see(AgentAddress.of(run, node))
        if not still_there(store, one.parts.values()):
            write_keys(store, PINNED, pins - {one.key})
            raise NothingHeldError(f"step {step} has just been deleted by retention: pin another one")
    if as_json:
        pinned = sorted(other.step for other in catalog.checkpoints if other.key in pins)
        print_json({"step": step, "pinned": not off, "steps": pinned})
        return
    typer.echo(f"step {step} is {'no longer pinned' if off else 'pinned: retention keeps it'}")


def _let_writer_see(address: AgentAddress) -> None:
    """Wait for a writer of this node that may have read the pins before this one was written."""
    deadline = time.monotonic() + _WRITER_SECONDS
    while (status := ask_status(address)) is not None and status.storage is not None and status.storage.saving:
        if time.monotonic() > deadline:
            said = "a checkpoint is still being written, and older ones are deleted after it: check with `memckpt ls`"
            err.print(said, style="yellow", markup=False, soft_wrap=True)
            return
        select.select([], [], [], 0.1)


def rm(
    run: Run,
    step: OfStep,
    force: Force = False,
    node: Node = None,
    url: Url = None,
    adopt: Adopt = False,
    as_json: AsJson = False,
) -> None:
    """Delete the newest checkpoint of a step.

    Refused without --force: a pinned checkpoint, the only complete one, one that logged steps need, and the newest one
    while an agent of the run answers. Exit status 1 if it is refused, 4 if there is no such checkpoint, 5 if the store
    belongs to another run.
    """
    store, catalog = _open(run, url, adopt)
    one = _chosen(catalog, step)
    pins = read_keys(store, PINNED)
    reasons = _reasons_to_keep(catalog, one, one.key in pins, AgentAddress.of(run, node))
    if reasons and not force:
        raise UsageError(f"step {step} is not deleted: {'; '.join(reasons)}. Delete it with --force")
    for reason in reasons:
        err.print(f"deleted with --force: {reason}", style="yellow", markup=False, soft_wrap=True)
    remove(store, one)
    if one.key in pins:
        write_keys(store, PINNED, pins - {one.key})
    if as_json:
        print_json({"step": step, "bytes": one.nbytes, "forced": reasons})
        return
    typer.echo(f"{checkpoint_name(one)}, is deleted ({nbytes_text(one.nbytes)})")


def _reasons_to_keep(catalog: Catalog, one: Checkpoint, pinned: bool, address: AgentAddress) -> list[str]:
    reasons = [f"it is pinned (`memckpt pin RUN {one.step} --off`)"] if pinned else []
    if not one.complete:
        return reasons
    if len(catalog.complete) == 1:
        reasons.append("it is the only complete checkpoint")
    lost = [step for step in only_on(catalog, one) if step != one.step]
    if lost:
        reasons.append(f"the logged steps {lost[0]} to {lost[-1]} can be redone only on it")
    if one.key == catalog.complete[0].key and _is_served(address):
        reasons.append("it is the newest one, and an agent of the run is alive")
    return reasons


def _is_served(address: AgentAddress) -> bool:
    """Whether an agent of the run is, or may be, alive on this node: an agent that does not answer in time may be."""
    try:
        return ask_status(address) is not None
    except MemckptError:
        return True


def gc(
    run: Run,
    dry_run: DryRun = False,
    node: Node = None,
    url: Url = None,
    adopt: Adopt = False,
    as_json: AsJson = False,
) -> None:
    """Delete unreferenced files in a run's storage: unfinished checkpoints, and records without a checkpoint.

    These are files of checkpoints and batches that were never finished, incomplete checkpoints older than a complete
    one, and logged records whose checkpoint is gone. Files that an agent may be writing stay; in a directory, without
    an agent, files unchanged for an hour count as abandoned. Exit status 4 if the run has nothing there, 5 if the store
    belongs to another run, 10 if a file cannot be read.
    """
    store, catalog = _open(run, url, adopt)
    address = AgentAddress.of(run, node)
    served = _is_served(address)

    def abandoned(path: str) -> bool:
        if served or not isinstance(store, LocalStore):
            return False
        try:
            return time.time() - (store.root / path).stat().st_mtime > _ABANDONED_SECONDS
        except FileNotFoundError:
            return False

    garbage = find_garbage(catalog, read_keys(store, PINNED), None if served else address.node, abandoned)
    checkpoints = [checkpoint_name(one) for one in garbage.checkpoints]
    batches = [batch.log_path for batch in garbage.batches]
    if not dry_run:
        delete(store, garbage)
    if as_json:
        found = {"unfinished": garbage.files, "incomplete": checkpoints, "batches": batches}
        print_json(found | {"deleted": not dry_run})
        return
    for kind, names in {"never finished": garbage.files, "lacks parts": checkpoints, "no base": batches}.items():
        for name in names:
            out.print(f"{kind:<14}  {name}", markup=False, soft_wrap=True)
    number = len(garbage.files) + len(checkpoints) + len(batches)
    if not number:
        out.print("nothing to delete")
    else:
        out.print(f"{count(number, 'item')} {'would be' if dry_run else 'are'} deleted")
