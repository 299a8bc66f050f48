"""``memckpt export``: a step of a run in a format that other tools read; ``memckpt.load``: the same as values."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from memckpt.cli.common import AsJson, Node, Run, Url, err, no_agent, out, print_json, store_of
from memckpt.cli.run_view import Adopt, catalog_of, check_owner, reading_progress
from memckpt.errors import (
    AgentNotFoundError,
    ConfigurationError,
    DamagedStateError,
    NothingHeldError,
    StorageError,
    StorageFullError,
    UsageError,
    without_our_frames,
)
from memckpt.processes.address import AgentAddress
from memckpt.processes.control import ask_status, save_to
from memckpt.processes.launch import hide_devices
from memckpt.storage.catalog import Catalog, Checkpoint, read_catalog
from memckpt.storage.chain import StoredPoint, stored_points
from memckpt.storage.local_store import LocalStore, sync_directory
from memckpt.storage.store import Store, verify_files
from memckpt.user_messages import nbytes_text

if TYPE_CHECKING:
    from memckpt.storage.export import ExportedState

To = Annotated[
    Path, typer.Option(help="Target file; for dcp, accelerate, transformers a directory. It must not exist.")
]
Step = Annotated[int | None, typer.Option(help="Step to export. Default: the newest.")]
Format = Annotated[
    str,
    typer.Option(
        "--format",
        help="torch, lightning, accelerate, transformers, torch_checkpointing, dcp, or safetensors (the model).",
    ),
]
Source = Annotated[str, typer.Option("--from", help="storage, or memory: the newest step that the agent holds.")]
#: Seconds that an agent may take to save the state that it holds.
_SAVE_SECONDS = 1800.0


def export(
    run: Run,
    to: To,
    step: Step = None,
    form: Format = "torch",
    source: Source = "storage",
    node: Node = None,
    url: Url = None,
    adopt: Adopt = False,
    as_json: AsJson = False,
) -> None:
    """Write a step in a format that other tools read: from storage, or from the memory of a run that is training.

    Exit status 4 if there is no such step, 5 if the store belongs to another run, 8 if the step is damaged. It is
    6 if there is no room for it, 11 if no agent answers.
    """
    from memckpt.storage.export import formats

    hide_devices()
    if to.exists():
        raise UsageError(f"{to} exists: choose another name, or remove it first")
    known = formats()
    if form not in known:
        raise ConfigurationError(f"--format: expected one of {', '.join(sorted(known))}, found {form!r}")
    if source not in ("storage", "memory"):
        raise ConfigurationError(f"--from: expected storage or memory, found {source!r}")
    if source == "memory":
        if step is not None:
            raise UsageError("--step: memory has its newest step only; leave it out, or use --from storage")
        found = _use_held(AgentAddress.of(run, node), to, partial(_write, to, form))
    else:
        found = _use_stored(store_of(run, url), run, step, to, partial(_write, to, form), adopt)
    nbytes = sum(path.stat().st_size for path in [to, *to.rglob("*")] if path.is_file())
    if as_json:
        print_json({"step": found.step, "to": str(to), "format": form, "bytes": nbytes})
    else:
        out.print(f"step {found.step} is in {to} ({form}, {nbytes_text(nbytes)})", markup=False, soft_wrap=True)


@without_our_frames
def load(
    run: str | Path,
    step: int | None = None,
    *,
    source: Literal["storage", "memory"] = "storage",
    url: str | None = None,
    node: str | None = None,
) -> ExportedState:
    """The state of a step as values on the CPU, for a script or a notebook: what each ``load_state_dict`` takes.

    Nothing about the run changes, which may be training.

    Args:
        run: the run directory.
        step: one that the storage has; None: the newest.
        source: ``"memory"``: the newest step that the agent holds, which needs room for it in the run directory.
        url: location of the checkpoints, a directory or URL; None: MEMCKPT_STORAGE_URL, or the run's last one.
        node: node of the agent; None: MEMCKPT_NODE, or this host's name.

    Raises:
        NothingHeldError: there is no such step.
        AgentNotFoundError: no agent answers, for ``source="memory"``.
        DamagedStateError: files of the step are damaged.
        ForeignStateError: the storage belongs to another run.
        UnsupportedError: the model was sharded by FSDP1.
    """
    from memckpt.storage.export import read_state

    run = Path(run)
    states: list[ExportedState] = []

    def add_state(store: Store, found: Checkpoint) -> None:
        states.append(read_state(store, found))

    if source == "memory":
        if step is not None:
            raise UsageError(f"step={step}: memory has its newest step only; leave it out, or use source='storage'")
        _use_held(AgentAddress.of(run, node), run / "load", add_state)
    else:
        _use_stored(store_of(run, url), run, step, run / "load", add_state, adopt=False, copies=0)
    return states[0]


#: What is done with a verified checkpoint.
_Use = Callable[[Store, Checkpoint], None]


def _beside(to: Path, stack: contextlib.ExitStack) -> LocalStore:
    """A temporary store beside the target."""
    to.parent.mkdir(parents=True, exist_ok=True)
    room = stack.enter_context(tempfile.TemporaryDirectory(prefix=f".{to.name}.", dir=to.parent))
    return LocalStore(Path(room).resolve())


def _use_held(address: AgentAddress, to: Path, use: _Use) -> Checkpoint:
    """Use the newest step that the agent holds. It writes a checkpoint of it beside `to`; training goes on."""
    held = ask_status(address)
    if held is None:
        raise AgentNotFoundError(f"{no_agent(address)}: nothing is held in memory")
    _check_room(to, held.held_bytes)
    with contextlib.ExitStack() as stack:
        beside = _beside(to, stack)
        with err.status("the agent saves its newest step"):
            save_to(address, str(beside.root), _SAVE_SECONDS)
        found = read_catalog(beside).checkpoints[0]
        use(beside, found)
    return found


def _use_stored(
    store: Store, run: Path, step: int | None, to: Path, use: _Use, adopt: bool, copies: int = 1
) -> Checkpoint:
    """Use a step from storage, of which `copies` are written at `to`.

    If retention deletes the newest one meanwhile, the next newest is taken.
    """
    while True:
        catalog = catalog_of(store, run)
        check_owner(store, catalog, run, adopt)
        point = _chosen(catalog, step)
        if step is None and catalog.unreadable:
            raise StorageError(f"the newest step is not known: {next(iter(catalog.unreadable.values()))}; give --step")
        try:
            with contextlib.ExitStack() as stack:
                where, found = _verified(store, point, to, stack, copies)
                use(where, found)
            return found
        except (StorageError, DamagedStateError):
            if step is not None or point.checkpoint.key in {one.key for one in catalog_of(store, run).checkpoints}:
                raise
            err.print(f"step {point.step} was deleted meanwhile: the newest one is taken", soft_wrap=True)


def _verified(
    store: Store, point: StoredPoint, to: Path, stack: contextlib.ExitStack, copies: int
) -> tuple[Store, Checkpoint]:
    """A verified checkpoint and its store; a step that has to be redone is first written to a temporary store."""
    nbytes = sum(file.nbytes for file in point.files)
    _check_room(to, point.checkpoint.nbytes * (copies + bool(point.batches)))
    with reading_progress(nbytes) as begin:
        problems = verify_files(store, point.files, begin(f"step {point.step}"))
    if problems:
        raise DamagedStateError(f"step {point.step} is damaged: {'; '.join(problems)}")
    if not point.batches:
        return store, point.checkpoint
    from memckpt.recovery.from_storage import as_checkpoint  # torch takes seconds, and most commands need none

    beside = _beside(to, stack)
    return beside, as_checkpoint(store, point, beside)


def _chosen(catalog: Catalog, step: int | None) -> StoredPoint:
    points = stored_points(catalog, also=step)
    for point in points:
        if step is None or point.step == step:
            return point
    steps = ", ".join(str(one) for one in sorted({point.step for point in points}))
    if step is None or not steps:
        raise NothingHeldError("the storage has no complete checkpoint yet")
    raise NothingHeldError(f"expected one of the steps that the storage has, {steps}, found step {step}")


def _check_room(to: Path, nbytes: int) -> None:
    """Check for room before minutes of reading. An export is hardly ever larger than the checkpoint."""
    directory = next(one for one in to.resolve().parents if one.is_dir())
    free = shutil.disk_usage(directory).free
    if free < nbytes:
        raise StorageFullError(f"expected {nbytes_text(nbytes)} of room in {directory}, found {nbytes_text(free)}")


def _write(to: Path, form: str, store: Store, found: Checkpoint) -> None:
    """Write under a temporary name and rename, so that `to` is always complete."""
    from memckpt.storage.export import export as export_checkpoint

    partial = to.with_name(f".{to.name}.partial-{secrets.token_hex(4)}")
    try:
        export_checkpoint(store, found, partial, form)
        partial.rename(to)
        sync_directory(to.parent)
    except BaseException as error:
        shutil.rmtree(partial) if partial.is_dir() else partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            raise StorageError(f"could not write {to}: {error}") from error
        raise
