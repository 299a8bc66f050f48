"""The settings: frozen dataclasses, one definition for Python, files, the command line and the environment.

Names include units. Explicit arguments win over environment variables. Nothing here imports torch. `checks` holds a
value against its field, `settings` lists the tree and reads files, `arguments` reads options and variables.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from memckpt.config.checks import Checked, Count, Names, NotNegative, Port, Positive, Share, Text, require
from memckpt.errors import ConfigurationError

RedoMode = Literal["eager", "lazy", "snapshot"]
RedoChoice = Literal["auto", "eager", "lazy", "snapshot"]
TapChoice = Literal["auto", "step"]
StorageMode = Literal["replica", "log"]
ResumeChoice = Literal["auto", "require", "exact", "never"]
AckPolicy = Literal["wait", "proceed"]
Security = Literal["curve", "plain"]
TuningChoice = Literal["auto", "off"]
LogMetricsChoice = Literal["main", "all", "none"]
SlicesChoice = Literal["auto", "always", "never"]
ResumeCheckChoice = Literal["auto", "witness", "replay", "require", "off"]
DomainLevel = Literal["auto", "node", "rack", "zone"]
ResidualChoice = Literal["auto", "keep", "drop"]
HalfType = Literal["bf16", "fp16"]
Seed = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]

#: T, the number of steps over which every tensor is anchored once. A longer period copies less at each step
#: (4 + 12/T bytes per parameter) and, in lazy mode, holds more records ((T + D)(4 + 12/T) bytes per parameter).
#: A snapshot has the whole state, so its period is always 1.
DEFAULT_ANCHOR_PERIOD = {"lazy": 8, "eager": 32, "snapshot": 1}
#: D, the number of records in flight.
DEFAULT_SLOTS = 3
#: Number of nodes from which on slices save more memory than their fragments on peers take.
SLICED_NODES = 3
#: With peers a window of T + D records is held in other nodes' memory in every mode.
_PEERS_ANCHOR_PERIOD = 8


@dataclass(frozen=True, kw_only=True)
class AgentConfig(Checked):
    """The process that holds base and log, one per node and run.

    Args:
        threads: CPU threads for redo.
        linger_seconds: seconds for which the agent keeps the state without a trainer.
        memory_budget_bytes: memory limit in bytes; None: what the machine and its cgroup have left.
        start_seconds: time limit for the agent's start and for each of its replies.
        liveness_seconds: seconds without a sign of life after which the agent, or its replicator, counts as hung
            (stopped, deadlocked). Training that waits for a hung agent goes on without it; a hung replicator is killed
            and replaced.
        fence_seconds: seconds that killed trainers of an earlier attempt may take to end before the new attempt is
            refused. On an accelerator 0.25 s for each GiB held come on top, in which its driver unlocks that memory.
        niceness: added to the agent's CPU niceness, so that training has priority.
        metrics_port: TCP port at which the agent answers Prometheus; 0: any, which `memckpt status` shows; None: none.
        metrics_host: address or host name at which it does; ``"0.0.0.0"``: all of the node's addresses.
        metrics_file: file that the agent writes its metrics to every 15 seconds, for nodes that are not scraped.
            ``{node}`` and ``{run}`` are replaced; a relative path begins in the run directory. None: none.
    """

    part: ClassVar[str] = "agent."
    threads: Count = 1
    linger_seconds: NotNegative = 1800.0
    memory_budget_bytes: Count | None = None
    start_seconds: Positive = 60.0
    liveness_seconds: Positive = 15.0
    fence_seconds: Positive = 60.0
    niceness: Annotated[int, Meta(ge=0, le=19)] = 10
    metrics_port: Port | None = None
    metrics_host: Text = "127.0.0.1"
    metrics_file: Text | None = None


@dataclass(frozen=True, kw_only=True)
class StorageConfig(Checked):
    """Checkpoints on a disk or in an object store, written by the agent.

    Args:
        url: a directory, or a URL of fsspec (``s3://bucket/run``); None: ``storage`` in the run directory. With several
            nodes all of them must share it.
        mode: ``"replica"`` writes checkpoints; ``"log"`` also every record between them, in batches, so that at most a
            batch and the records waiting for the writer are lost.
        every_steps: interval of checkpoints in steps; None: as often as the two limits below allow.
        min_seconds: minimum interval of checkpoints in seconds, if `every_steps` is None.
        overhead: the share of training time that taking and writing checkpoints may cost, if `every_steps` is None.
        batch_steps: records in a batch of the log; None: as few as leave a second between batches and the writer idle
            for 95% of the time. At most 64 records, or 64 MiB. A batch is written after 10 s at the latest.
        keep_last: number of checkpoints to keep; older ones are deleted once a newer one has been verified.
        keep_every_steps: checkpoints at multiples of this step are kept for good; None: none are.
        owner: id of the run that owns the store; another owner's store is refused. None: the id is made once, and kept
            in the run directory.
        timeout_seconds: time limit for writing a checkpoint.
        grace_seconds: time limit for writing a checkpoint after SIGTERM, when the machine may be about to go.
    """

    part: ClassVar[str] = "storage."
    url: Text | None = None
    mode: StorageMode = "replica"
    every_steps: Count | None = None
    min_seconds: NotNegative = 60.0
    overhead: Share = 0.01
    batch_steps: Count | None = None
    keep_last: Count = 2
    keep_every_steps: Count | None = None
    owner: Text | None = None
    timeout_seconds: Positive = 1800.0
    grace_seconds: Positive = 25.0


@dataclass(frozen=True, kw_only=True)
class ErasureConfig(Checked):
    """Records go to other nodes' memory as fragments of an erasure code; any m of a group's k + m nodes may be lost.

    With `data` = 1 these are plain copies: one on each of `tolerate` other nodes.

    Args:
        data: k, number of data fragments of a record; 1 makes plain copies.
        tolerate: m, number of nodes of a group that may be lost. The owner is a holder itself, so a record takes
            (k + m - 1) / k times its size on the network.
        backend: backend of liberasurecode, used if k and m are 2 or more.
        every_steps: N. 1: every record is sent. More: the whole state after every N-th step, in place of records, and
            training does not wait for it. None: the smallest N that the links carry, measured at the start, and chosen
            anew when a generation begins.
        ack: ``"wait"`` lets training wait for peers that are slower than it, so that the tolerated number of nodes can
            be lost at any time. ``"proceed"`` lets it go on, and reports the records that only the node's own memory
            held.
        security: ``"curve"`` encrypts and authenticates with new keys for each attempt; ``"plain"`` does neither.
        host: address or interface on which this node listens; None: the one that routes to the job's master.
        port: TCP port on which this node listens, and the one above it for records; 0: any.
        rate_bytes_per_second: the most that a node may send, in bytes per second; None: no limit.
        overhead: the share of a step's time that sending may cost; sending is slowed down accordingly.
        domain_level: the largest unit that fails at once: nodes, racks or zones; ``"auto"``: the widest that is known.
        rack, zone: location of this node; None: the environment's (MEMCKPT_RACK, MEMCKPT_ZONE, Slurm, Kubernetes).
        ack_timeout_seconds: with ``"wait"``, seconds for which training waits for a node that acknowledges nothing;
            then it goes on without that node, and reports it.
        recovery_patience_seconds: seconds for which a resume retries nodes that do not answer, if it would go back
            further without them. Then an older state serves; where there is none, the start ends with PeerError, as
            silence is no loss; only ``resume="never"`` starts over. 0: not at all.
    """

    part: ClassVar[str] = "peers."
    data: Annotated[int, Meta(ge=1, le=32)] = 2
    tolerate: Annotated[int, Meta(ge=1, le=32)] = 1
    backend: Text = "isa_l_rs_cauchy"
    every_steps: Count | None = None
    ack: AckPolicy = "wait"
    security: Security = "curve"
    host: Text | None = None
    port: Port = 0
    rate_bytes_per_second: Positive | None = None
    overhead: Share = 0.03
    domain_level: DomainLevel = "auto"
    rack: Text | None = None
    zone: Text | None = None
    ack_timeout_seconds: Positive = 15.0
    recovery_patience_seconds: NotNegative = 300.0

    @property
    def group_nodes(self) -> int:
        """Minimum number of nodes in a group, and so in the job."""
        return self.data + self.tolerate


# Gradient compression: one dataclass for each compressor


@dataclass(frozen=True, kw_only=True)
class CompressionConfig(Checked):
    """Averages gradients over all ranks in compressed form; use one of the subclasses."""

    part: ClassVar[str] = "compression."


@dataclass(frozen=True, kw_only=True)
class LossyConfig(CompressionConfig):
    """Common settings of compressors that leave out parts of a gradient.

    Args:
        min_elements: parameters with fewer elements are averaged as they are, uncompressed.
        error_feedback: adds what compression left out of a gradient to the next one (Karimireddy et al., 2019).
            Without it, training converges worse.
        residual: what becomes of left-out parts at a resume. ``"keep"`` makes them a part of each record, 4 bytes per
            parameter and rank, so that a resume is exact. ``"drop"`` sets them to zero, and the report of the resume
            says that it is not exact. ``"auto"`` keeps them unless records go to peers or to a log in storage.
    """

    min_elements: Count = 1024
    error_feedback: bool = True
    residual: ResidualChoice = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        kept = self.residual == "keep" and not self.error_feedback
        expected = "'auto' without error_feedback, as nothing is left out"
        require(not kept, "compression.residual", expected, self.residual)


@dataclass(frozen=True, kw_only=True)
class SparseConfig(LossyConfig):
    """Common settings of compressors that average a share of a gradient's elements.

    Args:
        ratio: share of a gradient's elements that each rank sends, more than 0 and less than 1.
    """

    ratio: Annotated[float, Meta(gt=0, lt=1)] = 0.01


@dataclass(frozen=True, kw_only=True)
class TopK(SparseConfig):
    """The elements of each gradient that are largest in absolute value.

    Each rank sends its own choice, so that the average over N ranks has up to N times as many elements.
    """


@dataclass(frozen=True, kw_only=True)
class RandomK(SparseConfig):
    """Elements of each gradient that are drawn anew at each step, the same on all ranks.

    Args:
        seed: seed of the draws.
    """

    seed: Seed = 0


@dataclass(frozen=True, kw_only=True)
class Quantized8(LossyConfig):
    """Each element as a signed byte, with a scale for each block of elements.

    Each rank sends a byte per element to each other rank: less than an uncompressed ring all-reduce up to 8 ranks.

    Args:
        block_elements: number of elements that share a scale.
    """

    block_elements: Annotated[int, Meta(ge=1, le=1 << 20)] = 256


@dataclass(frozen=True, kw_only=True)
class PowerSGD(LossyConfig):
    """The gradient as a product of two factors of low rank (Vogels et al., 2019, algorithm 1), with a warm start.

    Args:
        rank: number of columns of the factors.
        start_seed: seed of the factors at the start.
    """

    rank: Annotated[int, Meta(ge=1, le=1024)] = 4
    start_seed: Seed = 0


@dataclass(frozen=True, kw_only=True)
class HalfPrecision(CompressionConfig):
    """Each element in 16 bits, averaged in that type, as torch's ``bf16_compress_hook`` and ``fp16_compress_hook`` do.

    There is no error feedback: what rounding leaves out is not known before the average.

    Args:
        dtype: type in which gradients are averaged.
    """

    dtype: HalfType = "bf16"


# The tree


@dataclass(frozen=True, kw_only=True)
class MemckptConfig(Checked):
    """How a run is protected.

    Args:
        redo: ``"eager"`` applies each record to a replica at once (least memory, part of a core).
            ``"lazy"`` keeps the last records and applies them at restore (no work besides the copies).
            ``"snapshot"`` copies the whole state every `snapshot_every_steps` steps without redo, for optimizers whose
            steps cannot be redone. ``"auto"`` chooses and reports why.
        tap: ``"auto"`` copies gradients as backward produces them, compares them with those that the optimizer used,
            and changes to ``"step"`` if they differ; ``"step"`` copies them at the optimizer's step.
        anchor_period_steps: T, in steps; None: the default of the redo mode.
        slots: D, records in flight: one being filled, one waiting, one being applied; None: 3.
        snapshot_every_steps: N, interval of snapshots in steps; a crash loses fewer than N steps.
        agent: settings of the agent.
        peers: records in other nodes' memory, an ErasureConfig; None: none.
        storage: checkpoints beyond this node's memory; None: none are written or read.
        resume_check: how a resume proves itself, beyond the sample of the state that each restore compares.
            ``"witness"`` compares the first gradients with those that the dead attempt left of the same step, at no
            cost. ``"replay"`` repeats the last step and compares the whole state bit for bit. ``"auto"`` repeats it
            until that was equal once with this script, these versions and settings. ``"require"`` always, and ends
            training if they differ; ``"off"`` compares the sample only.
        compression: how DistributedDataParallel averages gradients: in compressed form by TopK, RandomK, Quantized8,
            PowerSGD or HalfPrecision, whose results are the records; None: as they are.
        tuning: ``"auto"`` has the interval of checkpoints follow what the running job measures, and says which other
            redo mode, T or D would pay; ``"off"`` does neither.
        overhead_budget: share of a step's time that protection may cost, by which settings are advised.
        audit_budget: share of a core that the audit of lazy redo may take, at most 1, once all tensors were audited;
            0: there is none.
        mtbf_seconds: mean time between failures that you expect of the job, in seconds (1 to 3.2e9); None: one day,
            until failures of the run show another.
        accept_changes: lets one attempt go on although ``"require"`` finds a difference, after a deliberate change.
        slices: whether nodes that hold the same state (DistributedDataParallel) protect one slice of it each, in place
            of all of it. Memory and copies are divided by the number of nodes, and a lost node's slice comes from peers
            or storage. ``"auto"``: with peers, and three nodes or more. It takes optimizers of torch that are
            element-wise.
        override: names of hyperparameters of parameter groups, such as ``("lr",)``, which a resume takes from the
            script where it has changed them, also in schedules. That resume is not exact; later ones keep them.
        log_metrics: figures of the protection that go to the framework's loggers (TensorBoard, CSV, W&B, trackers):
            ``"main"``: four of them, ``"all"``, or ``"none"``.
    """

    redo: RedoChoice = "auto"
    tap: TapChoice = "auto"
    anchor_period_steps: Annotated[int, Meta(ge=1, le=4096)] | None = None
    slots: Annotated[int, Meta(ge=2, le=64)] | None = None
    snapshot_every_steps: Annotated[int, Meta(ge=1, le=1_000_000)] = 10
    agent: AgentConfig = field(default_factory=AgentConfig)
    peers: ErasureConfig | None = None
    storage: StorageConfig | None = field(default_factory=StorageConfig)
    resume_check: ResumeCheckChoice = "auto"
    compression: TopK | RandomK | Quantized8 | PowerSGD | HalfPrecision | None = None
    tuning: TuningChoice = "auto"
    overhead_budget: Share = 0.03
    audit_budget: Annotated[float, Meta(ge=0, le=1)] = 0.01
    mtbf_seconds: Annotated[float, Meta(ge=1, le=3.2e9)] | None = None
    accept_changes: bool = False
    override: Names = ()
    log_metrics: LogMetricsChoice = "main"
    slices: SlicesChoice = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        compression = self.compression
        # The step's tap leaves DDP's averages to DDP, which does not compress.
        require(compression is None or self.tap == "auto", "tap", "'auto' with compression", self.tap)
        require(compression is None or self.redo != "snapshot", "compression", "None with redo='snapshot'", compression)

    @property
    def replays(self) -> bool:
        """Whether a resume repeats the last step to prove itself."""
        return self.resume_check in ("replay", "require")

    @property
    def reads_late(self) -> bool:
        """Whether peers or an explicit log read whole records for as long as these are in a slot."""
        return self.peers is not None or (self.storage is not None and self.storage.mode == "log")

    @property
    def records_in_flight(self) -> int:
        """D at the start of a run."""
        return DEFAULT_SLOTS if self.slots is None else self.slots

    def anchor_period(self, mode: RedoMode) -> int:
        """T for the chosen redo mode."""
        if mode == "snapshot":
            return DEFAULT_ANCHOR_PERIOD[mode]
        default = DEFAULT_ANCHOR_PERIOD[mode] if self.peers is None else _PEERS_ANCHOR_PERIOD
        return self.anchor_period_steps or default


def check_resume(resume: object, *, name: str = "resume") -> ResumeChoice | int:
    """Validate a ``resume`` argument, called `name` in the ConfigurationError that it raises."""
    try:
        checked: ResumeChoice | int = msgspec.convert(resume, ResumeChoice | Annotated[int, Meta(ge=0)])
    except msgspec.ValidationError:
        expected = "'auto', 'require', 'exact', 'never' or a step number of 0 or more"
        raise ConfigurationError(f"{name}: expected {expected}, found {resume!r}") from None
    return checked


def parse_resume(text: object, *, name: str = "resume") -> ResumeChoice | int:
    """Parse and validate a ``resume`` argument given as text or a value; digits are a step number."""
    if isinstance(text, str) and text.isascii() and text.isdigit():
        return int(text)
    return check_resume(text, name=name)
