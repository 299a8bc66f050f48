"""The ranks of a job: their nodes, what each holds and trains, and how they agree at the start.

Nothing here runs during training, except the self-test in the first steps, and a question every 128 steps.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from memckpt import errors
from memckpt.capture.copier import Copier
from memckpt.capture.live_state import LiveState
from memckpt.capture.recorder import Recorder
from memckpt.capture.taps.ddp import LOCAL_STEPS, refuse_local_sgd
from memckpt.capture.taps.shards import check_flattened, is_flattened
from memckpt.config import SLICED_NODES, MemckptConfig, ResumeChoice
from memckpt.config.arguments import LAUNCHER, RESTART_COUNT, ProtectionArguments
from memckpt.errors import MemckptError, UnsupportedError
from memckpt.processes.address import node_name
from memckpt.processes.handles import start_ticks
from memckpt.protocol.trainer import Launcher
from memckpt.recovery.restore import replica_digest
from memckpt.state import rng
from memckpt.state.optimizers import is_elementwise
from memckpt.state.slices import assign_slices
from memckpt.state.tensors import is_dtensor, local

T = TypeVar("T")
_log = logging.getLogger("memckpt")
_LAUNCH_FILE = "launch"
_LATER = (
    "a later training of this script is held in {}. If this start has skipped those before it, it takes up another "
    "one's state: give each training a run_dir of its own"
)
_OPEN = (
    "another session of this process with this run_dir is not closed. If its training has ended, this one takes up its "
    "state: call close() there, or give each training a run_dir of its own"
)


class Ranks:
    """This rank's place in the job, and a Gloo group for small messages between ranks.

    Attributes:
        rank, world_size: rank and size of the default process group; 0 and 1 without one.
        unit: ranks on this node that hold the same shards as this one, as :meth:`share` has found.
        replicas: ranks of the job that hold the same shards as this one.
        groups: ranks of the job grouped by the shards that they hold, each group ascending.
        shares: whether ranks of some node hold the same shards, and thus share slots.
        slice_number, slice_count: the slice of the state that this node protects, of so many; 0 and 1: all of it.
    """

    def __init__(self) -> None:
        self._group: Any = None
        self.rank, self.world_size = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        if self.world_size > 1 and dist.get_backend() != "gloo":
            self._group = dist.new_group(backend="gloo")
        self.node = node_name()
        nodes = self.gather((self.node, secrets.token_hex(8)))
        self._nodes = [node for node, _ in nodes]
        self.local_ranks = tuple(rank for rank, node in enumerate(self._nodes) if node == self.node)
        self.nonce = nodes[0][1]
        self.unit, self.replicas = self.local_ranks, tuple(range(self.world_size))
        self.groups = [self.replicas]
        self.slice_number, self.slice_count = 0, 1

    def share(self, shards: str) -> None:
        """Set units, replicas and groups; `shards` is equal on ranks that hold the same. Collective."""
        everybody = self.gather(shards)
        groups: dict[str, list[int]] = {}
        for rank, each in enumerate(everybody):
            groups.setdefault(each, []).append(rank)
        self.groups = [tuple(ranks) for ranks in groups.values()]
        self.replicas = tuple(groups[shards])
        self.unit = tuple(rank for rank in self.local_ranks if rank in groups[shards])

    def slice_by_node(self) -> None:
        """Have each node protect a slice of what all have: no other node holds what it holds then. Collective."""
        nodes = list(dict.fromkeys(self._nodes))
        self.slice_number, self.slice_count = nodes.index(self.node), len(nodes)
        self.share(f"slice {self.slice_number}")

    @property
    def node_count(self) -> int:
        """Number of nodes of the job."""
        return len(set(self._nodes))

    @property
    def leads(self) -> bool:
        """Whether this is the first rank of its node."""
        return self.rank == self.local_ranks[0]

    @property
    def shares(self) -> bool:
        places = [[self._nodes[rank] for rank in ranks] for ranks in self.groups]
        return any(len(set(nodes)) < len(nodes) for nodes in places)

    def gather(self, value: T) -> list[T]:
        """Values of all ranks, by rank; collective."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def first_reason(self, reason: str) -> str:
        """The first reason, in words, that some rank has; empty if none has one. Collective."""
        return next(filter(None, self.gather(reason)), "")

    def by_node(self, values: Sequence[T]) -> list[list[T]]:
        """Values of all ranks, grouped by node."""
        found: dict[str, list[T]] = {}
        for node, value in zip(self._nodes, values, strict=True):
            found.setdefault(node, []).append(value)
        return list(found.values())

    def first_alike(self, state: rng.RngState) -> int:
        """The first rank whose torch generator is in the same state; collective. Python's differs in each process."""
        everybody = self.gather(hashlib.blake2b(state["torch"], digest_size=16).digest())
        return everybody.index(everybody[self.rank])

    def together(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank and gather the results; collective.

        If one rank raises an exception, every rank does: none waits in its next collective for a rank that has left.
        What is none of ours is a MemckptError on the others.
        """
        result: tuple[str, Any]
        failure: Exception | None = None
        try:
            result = "", work()
        except Exception as error:  # raised again below
            failure = error
            result = type(error).__name__, str(error)
        results: list[tuple[str, Any]] = self.gather(result)
        if failure is not None:
            raise failure
        for rank, (kind, value) in enumerate(results):
            if kind:
                known = getattr(errors, kind, None)
                raise known(f"rank {rank}: {value}") if known else MemckptError(f"rank {rank}: {kind}: {value}")
        return [value for _, value in results]

    def open_groups(self, groups: Sequence[Sequence[int]]) -> Any:
        """Process groups of these ranks, all of which are in one; returns this rank's. Collective over all ranks."""
        # A job's backend may be for its device alone (NCCL), and some state is in host memory, such as Adam's step.
        backends = dist.get_backend_config()
        with_host = backends if "cpu:" in backends else f"cpu:gloo,{backends}"
        opened = [dist.new_group(list(ranks), backend=with_host) for ranks in groups]
        return next(one for ranks, one in zip(groups, opened, strict=True) if self.rank in ranks)

    @torch.no_grad()
    def broadcast_tensor(self, tensor: torch.Tensor, source: int, group: Any) -> None:
        """Overwrite `tensor`, in place, with that of the rank `source`."""
        dense = tensor.contiguous()  # what else there is, backends refuse
        dist.broadcast(dense, source, group=group)
        if dense is not tensor:
            tensor.copy_(dense)


def find_launcher(world_size: int) -> Launcher:
    """The process that restarts this trainer when it dies: torchrun, `memckpt run`, or the parent of several ranks.

    It is the parent, or what `memckpt worker` names. A single process that was started by hand has none: its parent is
    a shell, which may end earlier.
    """
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT") or os.environ.get(RESTART_COUNT)
    parent = int(os.environ.get(LAUNCHER) or os.getppid())
    if restarts is None and world_size == 1:
        return Launcher(0, 0, 0)
    return Launcher(parent, start_ticks(parent), int(restarts or 0))


class Launch:
    """What starts the attempts of a training: its restarts obey ``resume="never"``, or a step, once and not each time.

    A file in the run directory names the launch that has obeyed, and the attempt in which it did. A process that
    attaches once more has decided anew, and so has a restart for which nothing is left of that attempt, or a later one.

    Attributes:
        asked: what the user asks for.
    """

    #: Files that this process has asked.
    _asked: ClassVar[set[Path]] = set()

    def __init__(self, run_dir: Path, ranks: Ranks) -> None:
        found = find_launcher(ranks.world_size)
        self._name = f"{found.pid} {found.start_ticks}" if found.pid else ""
        self._is_restart = found.restarts > 0
        self._file, self._ranks = run_dir / _LAUNCH_FILE, ranks
        self.asked: ResumeChoice | int = "auto"
        #: The attempt in which an earlier one of this launch has obeyed; 0: none has.
        self._obeyed_in = 0
        #: Commits until the file is written, on rank 0 where the launch obeys now. The first may still be on its way.
        self._commits_left = 0

    def resolve(self, resume: ResumeChoice | int) -> ResumeChoice | int:
        """`resume`, or ``"auto"`` where an earlier attempt of this launch has obeyed it; collective."""
        asks = self._is_restart and self._file not in self._asked
        self._asked.add(self._file)
        obeyed_in = self._ranks.gather(self._noted() if asks else 0)[0]
        self.asked = resume
        if resume != "never" and not isinstance(resume, int):
            return resume
        if obeyed_in:
            self._obeyed_in = obeyed_in
            return "auto"
        self._commits_left = 2 if self._name and self._ranks.rank == 0 else 0
        return resume

    def settle(self, resume: ResumeChoice | int, newest: int) -> ResumeChoice | int:
        """What is resumed, once it is known of which attempt the newest state is that is held anywhere; 0: of none."""
        if not self._obeyed_in:
            return resume
        if newest < self._obeyed_in:
            self._commits_left = 2 if self._ranks.rank == 0 else 0
            return self.asked
        if self._ranks.rank == 0:
            _log.warning("memckpt: resume=%r was obeyed by an earlier attempt of this launch: it goes on", self.asked)
        return resume

    def note_obeyed(self, attempt: int) -> None:
        """Note at the second commit of this attempt, from which a restart goes on, that the launch has obeyed."""
        if not self._commits_left:
            return
        self._commits_left -= 1
        if self._commits_left:
            return
        written = self._file.with_name(f"{_LAUNCH_FILE}.new")
        try:
            written.write_text(f"{self._name} {attempt}")
            written.replace(self._file)
        except OSError as error:
            _log.warning("memckpt: each restart of this launch starts over, as no file can be written: %s", error)

    def _noted(self) -> int:
        """The attempt in which this launch has obeyed; 0: it has not."""
        try:
            name, _, attempt = self._file.read_text(errors="replace").rpartition(" ")
        except OSError:  # no launch has obeyed; the other ranks wait for this one's answer
            return 0
        return int(attempt) if name == self._name and attempt.isdecimal() else 0


class Ordinal:
    """Which training of this process a session protects, of those with one run directory: 1, 2, ...

    A script may pretrain and finetune. Started again, its first training must not go on from what its second one held.
    """

    #: By run directory: trainings that have finished, and sessions that are not closed.
    _finished: ClassVar[Counter[Path]] = Counter()
    _open: ClassVar[Counter[Path]] = Counter()

    def __init__(self, run_dir: str, ranks: Ranks) -> None:
        self._run_dir, self._leads = Path(run_dir).resolve(), ranks.rank == 0
        # One rank may have failed behind the last commit of a training that the others have finished.
        self._number = min(ranks.together(lambda: self._finished[self._run_dir])) + 1

    def find_doubt(self) -> str:
        """Why what is held may be another training's, in words; empty if nothing says so."""
        later = self._run_dir / f"training-{self._number + 1}"
        if self._open[self._run_dir]:
            return _OPEN
        return _LATER.format(later) if later.is_dir() else ""

    def place(self, arguments: ProtectionArguments) -> ProtectionArguments:
        """The arguments for this training: behind the first one, a folder in the run directory and in the storage."""
        if self._number == 1:
            return arguments
        name = f"training-{self._number}"
        config, run_dir = arguments.config, str(Path(arguments.run_dir) / name)
        storage = config.storage
        if storage is not None and storage.url is not None:
            config = replace(config, storage=replace(storage, url=f"{storage.url.rstrip('/')}/{name}"))
        if self._leads:
            _log.warning(
                "memckpt: %s has finished a training of this process: training %d is held in %s. A restarted script "
                "runs the former ones again, or takes their final step from storage",
                arguments.run_dir,
                self._number,
                run_dir,
            )
        # What is asked of a start is asked of the first: nothing is held of one that has not begun.
        resume = "auto" if arguments.resume == "require" else arguments.resume
        return ProtectionArguments(run_dir, resume, config)

    def note_open(self) -> None:
        """Count a session that has begun."""
        self._open[self._run_dir] += 1

    def note_closed(self, finished: bool) -> None:
        """Have the next session with the run directory protect another training, if this one has finished."""
        self._open[self._run_dir] -= 1
        if finished:
            self._finished[self._run_dir] = self._number


def refuse_unordered(
    model: nn.Module, optimizers: Sequence[Optimizer], data_parallel: DistributedDataParallel | None
) -> None:
    """Refuse trainings that do not synchronize all ranks in every record.

    Gradients of a record on one rank have to imply that every rank has committed the record before it. Nodes agree on
    the record to restore by that.
    """
    for optimizer in optimizers:
        if type(optimizer).__name__ == "PostLocalSGDOptimizer":
            raise UnsupportedError(f"local SGD (PostLocalSGDOptimizer): {LOCAL_STEPS}")
    # A stage itself is no module.
    parts = model.modules() if isinstance(model, nn.Module) else [model]
    if any(type(one).__module__.startswith("torch.distributed.pipelining") for one in parts):
        raise UnsupportedError(
            "a pipeline stage: ranks of different stages are reduced apart, so that one may be steps ahead of another; "
            "expected a model that every rank runs as a whole (DistributedDataParallel, fully_shard, tensor parallel)"
        )
    if data_parallel is not None:
        for hook in getattr(data_parallel, "_comm_hooks", []):
            refuse_local_sgd(*hook)


def take_own_modules(modules: dict[str, nn.Module], ranks: Ranks) -> dict[str, nn.Module]:
    """Take out modules that other ranks lack, as an average on rank 0: they are part of no layout. Collective."""
    everywhere = set.intersection(*map(set, ranks.gather(list(modules))))
    return {name: modules.pop(name) for name in [*modules] if name not in everywhere}


def refuse_other_tensors(live: LiveState, ranks: Ranks) -> None:
    """Refuse ranks that share slots and have other tensors: their records would never be complete. Collective."""
    kinds = {name: f"{list(local(one).shape)} of {one.dtype}" for name, one in live.tensors().items()}
    first = ranks.gather(kinds)[ranks.unit[0]]
    problem = ""
    if name := min((name for name in {*first, *kinds} if first.get(name) != kinds.get(name)), default=""):
        ours, theirs = kinds.get(name, "no such tensor"), first.get(name, "no such tensor")
        problem = f"{name} on rank {ranks.unit[0]} is {theirs}, on rank {ranks.rank} {ours}"
    if found := ranks.first_reason(problem):
        raise UnsupportedError(
            f"ranks of one node with other tensors: expected the same ones, which share each record's memory; found: "
            f"{found}. Make the model on every rank alike"
        )


def refuse_few_slots(slots: int, ranks: Ranks) -> None:
    """Refuse too few records in flight for several ranks."""
    if ranks.world_size > 1 and slots < 3:
        raise UnsupportedError(
            f"slots: expected 3 or more with several ranks (their commits differ by one), found {slots}"
        )


def refuse_join_context(data_parallel: DistributedDataParallel | None) -> None:
    """Refuse uneven inputs, which only a batch shows: the model is in a ``join`` context."""
    config = getattr(data_parallel, "_join_config", None)
    if config is not None and config.enable:
        raise UnsupportedError(
            "uneven inputs (join): a rank that has run out of data commits no more, so that the others get ahead of "
            "it; expected as many batches on every rank: drop the last ones (drop_last=True, or a sampler that pads)"
        )


def find_replicas(
    live: LiveState, ranks: Ranks, data_parallel: DistributedDataParallel | None, replicated: Sequence[str]
) -> None:
    """Group the ranks by the shards that they hold, from the placements of DTensors; collective.

    `replicated` are patterns of names of plain parameters that are equal on all ranks; others count as a rank's own.
    """
    pieces = live.pieces()
    flattened = is_flattened(live.model)
    ranks.together(lambda: check_flattened(live.model, ranks.world_size))
    if ranks.world_size == 1:
        return
    kinds = ranks.gather((flattened, bool(pieces)))
    if any(flat and cut for flat, cut in kinds) or len({flat for flat, _ in kinds}) > 1:
        raise UnsupportedError(
            "FullyShardedDataParallel (FSDP1) beside DTensors, or on some ranks only: expected one way to shard; "
            "apply fully_shard (FSDP2), which goes together with tensor parallelism"
        )
    if flattened:
        # Pieces of flat parameters are no part of any tensor that another rank knows.
        ranks.share(f"rank {ranks.rank}")
        return
    if not any(cut for _, cut in kinds):
        if data_parallel is None:
            raise UnsupportedError(
                f"{ranks.world_size} ranks without DistributedDataParallel and without sharded parameters: expected "
                "the DDP wrapper as data_parallel (or as the model itself), or a model that fully_shard, "
                "parallelize_module or FullyShardedDataParallel was applied to, so that records hold synchronized "
                "gradients; several ranks with models of their own, as in pipeline stages, are not supported"
            )
        return
    if data_parallel is not None:
        raise UnsupportedError(
            "DistributedDataParallel around sharded parameters: expected fully_shard with a mesh of two dimensions "
            "(replicate, shard), which reduces both ways"
        )
    _refuse_partial_meshes(live, ranks)
    whole = live.whole_parameters()
    declared = {name: one for name, one in whole.items() if any(fnmatchcase(name, pattern) for pattern in replicated)}
    _refuse_differing(declared, ranks)
    private = len(declared) < len(whole)
    # A rank with parameters of its own shares nothing.
    held = (pieces, ranks.rank if private else -1)
    ranks.share(hashlib.blake2b(msgspec.msgpack.encode(held), digest_size=16).hexdigest())


def find_slices(config: MemckptConfig, live: LiveState, ranks: Ranks) -> None:
    """Slice the state by node where that is wanted, and possible; collective.

    Raises:
        UnsupportedError: slices are wanted always, and are not possible.
    """
    nodes = ranks.node_count
    if config.slices == "never" or nodes == 1:
        return
    reason = ranks.first_reason(_why_no_slices(config, live, ranks))
    if reason and config.slices == "always":
        raise UnsupportedError(f"slices='always': {reason}; use slices='auto'")
    if reason or (config.slices == "auto" and (config.peers is None or nodes < SLICED_NODES)):
        return
    ranks.slice_by_node()
    found: dict[str, int] = {}
    for stepped in (True, False):  # each kind is balanced by itself: frozen ones cost nothing in a step
        sizes = {name: one.nbytes for name, one in live.named_parameters() if one.requires_grad == stepped}
        found |= assign_slices(sizes, nodes)
    live.slices = ranks.gather(found)[0]  # of one mind, whatever a rank's own look finds


def _why_no_slices(config: MemckptConfig, live: LiveState, ranks: Ranks) -> str:
    """Why nodes cannot hold slices, in words; empty if they can."""
    if len(ranks.groups) > 1 or live.sharded or is_flattened(live.model):
        return "expected DistributedDataParallel alone, found parameters that are sharded already"
    if config.compression is not None:
        return "expected gradients as they are, found compression"
    odd = next((each for each in live.optimizers if not is_elementwise(each)), None)
    if odd is not None or live.not_redoable:
        name = type(odd or live.optimizers[next(iter(live.not_redoable))]).__qualname__
        return f"expected optimizers of torch that are element-wise, found {name}"
    return ""


def find_own_buffers(live: LiveState, ranks: Ranks) -> set[str]:
    """Names of large buffers that differ between ranks, and so cannot be static, held once a node; collective."""
    if ranks.world_size == 1:
        return set()
    own = {name: replica_digest([tensor], []) for name, tensor in live.large_buffers().items()}
    everybody = ranks.gather(own)
    return {name for name, digest in own.items() if any(each.get(name) != digest for each in everybody)}


def _refuse_partial_meshes(live: LiveState, ranks: Ranks) -> None:
    reached: set[int] = set()
    for tensor in live.tensors().values():
        if is_dtensor(tensor):
            reached |= {int(rank) for rank in tensor.device_mesh.mesh.flatten()}
    missing = sorted(set(range(ranks.world_size)) - reached)
    problem = f"rank {ranks.rank} shares no tensor with the ranks {missing}" if missing else ""
    found = ranks.first_reason(problem)
    if found:
        raise UnsupportedError(
            f"device meshes that do not cover the job: {found}, as in pipeline stages, whose ranks may be steps apart; "
            "expected every rank on the mesh of the model"
        )


def _refuse_differing(declared: dict[str, torch.Tensor], ranks: Ranks) -> None:
    digests = ranks.gather({name: replica_digest([tensor], []) for name, tensor in declared.items()})
    differing = [name for name in declared if len({each.get(name) for each in digests}) > 1]
    if differing:
        raise UnsupportedError(
            f"replicated: expected {differing[0]} to be the same on all ranks, found other values on some; "
            "broadcast it first, or leave it out: then each rank's own is kept"
        )


@dataclass(frozen=True)
class LocalTraining:
    """Objects that the classes of a session share, and limits of exactness and of checks. Owns nothing to be closed."""

    config: MemckptConfig
    ranks: Ranks
    live: LiveState
    device: torch.device
    copier: Copier
    recorder: Recorder
    caveats: list[str] = field(default_factory=list)

    def any_accelerator(self) -> bool:
        """Whether some rank trains on an accelerator; collective."""
        return any(self.ranks.gather(any(local(one).device.type != "cpu" for one in self.live.tensors().values())))
