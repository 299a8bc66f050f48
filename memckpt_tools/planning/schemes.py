"""The ways to protect a job: baselines, those of this product, and the one that is recommended."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from memckpt.config import (
    SLICED_NODES,
    AgentConfig,
    ErasureConfig,
    MemckptConfig,
    Quantized8,
    RedoMode,
    StorageConfig,
    TopK,
)
from memckpt.state.link_time import LinkTime
from memckpt.user_messages import seconds_text
from memckpt_tools.planning.footprint import (
    PRIVATE_WIRE_BYTES,
    Held,
    NodeMemory,
    compressed_gradient_bytes,
    from_peers_seconds,
    from_window_seconds,
    node_memory,
    redo_seconds,
    state_wire_bytes,
    wire_bytes,
)
from memckpt_tools.planning.job import Job
from memckpt_tools.planning.scheme import Planned, Scheme, Tier, peer_rate, storage_tier


def node_state_bytes(job: Job) -> float:
    """Bytes of the state that a node holds."""
    return job.node_parameters * job.state_bytes


def read_seconds(job: Job) -> float:
    """Time in which all nodes read the newest checkpoint: each replica reads all of it."""
    return job.replicas * job.state_total_bytes / job.disk_bytes_per_second


def unprotected(job: Job) -> Planned:
    """Nothing: each failure starts over."""
    scheme = Scheme(name="none", overhead=0.0, tiers=())
    return Planned(job=job, scheme=scheme, choice="starts over", memory=NodeMemory(agent=0.0))


def synchronous(job: Job) -> Planned:
    """``torch.save`` or DCP to storage, for which training waits, at Daly's interval."""
    write = node_state_bytes(job) / job.copy_bytes_per_second + job.state_total_bytes / job.disk_bytes_per_second
    interval = max(job.step_seconds, daly_interval(write, job.mtbf_seconds))
    scheme = Scheme(
        name="torch.save",
        overhead=write / interval,
        tiers=(storage_tier("storage", job, interval, 0.0, read_seconds(job)),),
        disk_bytes=job.state_total_bytes * job.step_seconds / interval,
    )
    return Planned(job=job, scheme=scheme, choice=f"every {seconds_text(interval)}", memory=NodeMemory(agent=0.0))


def asynchronous(job: Job) -> Planned:
    """``dcp.async_save``: checkpoints that training waits for until they are in host memory; persisted meanwhile.

    Source: "Reducing Model Checkpointing Times by Over 10x with PyTorch Distributed Asynchronous Checkpointing", 2024,
    "How does Asynchronous Checkpointing work?". One is persisted at a time, so the interval is Young's or the time that
    persisting takes, whichever is longer.
    """
    copy = node_state_bytes(job) / job.copy_bytes_per_second
    persist = job.state_total_bytes / job.disk_bytes_per_second
    interval = max(job.step_seconds, persist, young_interval(copy, job.mtbf_seconds))
    scheme = Scheme(
        name="dcp.async_save",
        overhead=copy / interval,
        tiers=(storage_tier("storage", job, interval, persist, read_seconds(job)),),
        memory_bytes=node_state_bytes(job),
        disk_bytes=job.state_total_bytes * job.step_seconds / interval,
    )
    memory = NodeMemory(agent=0.0, state_copy=node_state_bytes(job))
    return Planned(job=job, scheme=scheme, choice=f"every {seconds_text(interval)}", memory=memory)


def young_interval(write_seconds: float, mttf_seconds: float) -> float:
    """Young's optimal time between two checkpoints, in seconds: sqrt(2 x write x MTTF).

    Source: J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974.
    """
    return math.sqrt(2 * write_seconds * mttf_seconds)


def daly_interval(write_seconds: float, mttf_seconds: float) -> float:
    """Daly's optimal computing time between two checkpoints, without the write, in seconds.

    Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22, 2006.
    Equation 37: with x = sqrt(write / (2 MTTF)), sqrt(2 write MTTF) (1 + x/3 + x^2/9) - write where the write takes
    less than twice the MTTF, else the MTTF.
    """
    young = young_interval(write_seconds, mttf_seconds)
    if write_seconds >= 2 * mttf_seconds:
        return mttf_seconds
    ratio = math.sqrt(write_seconds / (2 * mttf_seconds))
    return young * (1 + ratio / 3 + ratio * ratio / 9) - write_seconds


#: (mode, T) in the order in which they are preferred where others are no better; None: the default of the mode.
_REDONE: tuple[tuple[RedoMode, int | None], ...] = (
    ("lazy", None), ("lazy", 4), ("lazy", 16), ("lazy", 32), ("eager", None), ("eager", 16), ("eager", 32),
)  # fmt: skip
#: A scheme of last resort: the whole state every N steps.
_LOCAL = (*_REDONE, ("snapshot", None))
_DATA, _TOLERATED = (1, 2, 3, 4, 6, 8), (1, 2, 3, 4)
#: Differences of ETTR below this one do not matter.
SAME_ETTR = 1e-3
#: Limits of an anchor period with compressed gradients, as ``memckpt.session.compressed_averages.period_for`` has them.
_REDO_SECONDS, _SHORTEST, _LONGEST = 5.0, 8, 512
#: Seconds that a piece takes for each record, on a core and on an accelerator, and the rate from which on it is one.
_PIECE_SECONDS, _ON_ACCELERATORS, _TENSORS = (1e-4, 3e-4), 1e9, 200
#: A parameter whose compressed size stands for all: a weight matrix of 4096 x 4096.
_TYPICAL_SHAPE = (4096, 4096)
#: What compression leaves out of gradients, for each parameter and rank, where the model is.
_RESIDUAL_BYTES = 4.0
#: Records of a batch of the log, as ``memckpt.agent.saving.record_log`` has them.
_MOST_BATCH_STEPS, _MOST_BATCH_BYTES = 64, 64 << 20


def memory_only(job: Job) -> Planned:
    """Base and log in the node's own memory, checkpoints behind them."""
    return best(_setting(job, "memory", "", mode, period) for mode, period in _LOCAL)


def copies(job: Job) -> Planned:
    """Records as plain copies on other nodes: as many as the budget of losses takes."""
    return _coded(job, "copies", (1,))


def erasure(job: Job) -> Planned:
    """Records as fragments of a code on other nodes: k and m with the least traffic for the budget of losses."""
    return _coded(job, "(k, m)", _DATA[1:])


def logged(job: Job) -> Planned:
    """Every record in storage, too, in batches."""
    return best(_setting(job, "log", "", mode, period, log=True) for mode, period in _REDONE)


def compressed(job: Job) -> Planned:
    """Averages in compressed form, which are the records; all of them in storage."""
    ranks = job.nodes * max(1, job.gpus_per_node)
    choices = [(one, compressed_gradient_bytes(one, [_TYPICAL_SHAPE], ranks=ranks)) for one in (TopK(), Quantized8())]
    compressor, gradient_bytes = min(choices, key=lambda choice: choice[1])
    smaller = replace(job, gradient_bytes=min(job.gradient_bytes, gradient_bytes))
    period = compressed_period(job, gradient_bytes)
    residual = 0.0 if job.gpus_per_node else _RESIDUAL_BYTES * job.node_parameters  # else on the accelerators
    found = _setting(smaller, "compressed", type(compressor).__name__, "lazy", period, log=True, residual=residual)
    assert found.config is not None
    refused = list(found.refused)
    if job.replicas < job.nodes:
        refused.append("compression: expected DistributedDataParallel (replicas = nodes)")
    return replace(
        found,
        config=replace(found.config, compression=compressor, anchor_period_steps=None),
        exact=False,  # where records go to a log, what compression leaves out of them is dropped at a resume
        refused=tuple(refused),
        notes=(*found.notes, "changes what is trained: compare the loss"),
    )


def compressed_period(job: Job, gradient_bytes: float) -> int:
    """T for compressed gradients, as a session chooses it. Source: docs/compression.md, "Anchors".

    12/c for gradients of c bytes, a power of two from 8 to 512, so that redo at a restore takes 5 seconds at most. A
    time for each element, and one for each piece of a parameter, taken for a model of 200 parameter tensors.
    """
    each = _PIECE_SECONDS[job.redo_parameters_per_second > _ON_ACCELERATORS]
    period = _SHORTEST
    while period < min(_LONGEST, 12 / gradient_bytes):
        longer = 2 * period
        redone = job.node_parameters / job.redo_parameters_per_second + (longer + _TENSORS) * each
        if longer / 2 * redone > _REDO_SECONDS:
            break
        period = longer
    return period


def _coded(job: Job, name: str, data: Sequence[int]) -> Planned:
    pairs = [(k, m) for m in _TOLERATED for k in data if k + m <= job.nodes] or [(data[0], 1)]
    return best(
        _setting(job, name, f"k={k}, m={m}", mode, period, peers=ErasureConfig(data=k, tolerate=m))
        for mode, period in _LOCAL
        for k, m in pairs
    )


def best(found: Iterator[Planned]) -> Planned:
    """The best of some settings, which are given in the order of preference by mode and T.

    First those without problems, then those within the budget of losses, then those of the highest ETTR, then exact
    ones. Of these the first mode and T, and with it the least traffic and memory. If all have problems: the cheapest.
    """
    offers = list(found)
    kept = [one for one in offers if one.fits]
    if not kept:
        return min(offers, key=lambda one: (len(one.problems), one.scheme.overhead, one.memory.peak))
    kept = [one for one in kept if one.keeps_memory] or kept
    most = max(one.expectation.ettr for one in kept)
    kept = [one for one in kept if one.expectation.ettr >= most - SAME_ETTR]
    kept = [one for one in kept if one.exact] or kept
    first = _local(kept[0])
    return min((one for one in kept if _local(one) == first), key=lambda one: (one.scheme.wire_bytes, one.memory.total))


def _local(one: Planned) -> tuple[str, int | None] | None:
    return None if one.config is None else (one.config.redo, one.config.anchor_period_steps)


@dataclass(frozen=True)
class _Beyond:
    """A tier beyond the node's own memory, what it costs, and how it is used, in words."""

    tier: Tier
    overhead: float  #: share of training time for which training waits
    nbytes: float  #: bytes that a node sends, or that the job writes, for each step
    note: str = ""
    problem: str = ""


def _sending(job: Job, peers: ErasureConfig, held: Held, private: bool, snapshot_every: int) -> _Beyond:
    """Records to peers where training need not wait for them, else the state after every N-th step."""
    rate, copying = peer_rate(job), job.copy_bytes_per_second
    if private:  # a restore fetches the state of another replica, and copies it
        tier = Tier(
            name="replicas",
            every_steps=snapshot_every or 1,
            lag_steps=1.0,
            restore_seconds=held.whole_bytes / rate + held.whole_bytes / copying,
            rebuild_seconds=job.step_seconds,
            group_nodes=job.replicas,
            tolerates=job.replicas - 1,
        )
        return _Beyond(tier, 0.0, PRIVATE_WIRE_BYTES)
    sent, state, free = (
        wire_bytes(peers, held),
        state_wire_bytes(peers, held),
        job.step_seconds * job.network_idle_share,
    )
    waits = max(0.0, sent / rate - free) / job.step_seconds
    every, overhead, note = float(snapshot_every), 0.0, ""
    if snapshot_every:
        lag, sent = min(every, state / rate / free), state / every
    elif waits <= job.overhead_budget:
        every, overhead = 1.0, waits
        lag = held.slots if waits else min(float(held.slots), sent / rate / free)
    else:
        every = lag = max(1, math.ceil(state / rate / free))
        overhead, sent = held.whole_bytes / copying / job.step_seconds / every, state / every
        note = f"the links do not carry every record: the state after every {every} steps"
    tier = Tier(
        name="peers",
        every_steps=every,
        lag_steps=lag,
        restore_seconds=from_peers_seconds(held, rate, copying, job.redo_parameters_per_second),
        rebuild_seconds=state / rate,
        group_nodes=peers.group_nodes,
        tolerates=peers.tolerate,
    )
    return _Beyond(tier, overhead, sent, note)


def _setting(
    job: Job,
    name: str,
    choice: str,
    mode: RedoMode,
    period: int | None,
    *,
    peers: ErasureConfig | None = None,
    log: bool = False,
    residual: float = 0.0,
) -> Planned:
    """One setting of this product, evaluated for the job; `residual`: bytes of left-out parts of gradients."""
    every = snapshot_every(job) if mode == "snapshot" else 0
    config = _config(job, mode, period, peers, log, every)
    # slices="auto": nodes that all hold the same state protect a part of it each.
    sliced = peers is not None and job.nodes == job.replicas >= SLICED_NODES and mode != "snapshot"
    held = Held(
        parameters=job.node_parameters / (job.nodes if sliced else 1),
        gradient_bytes=job.gradient_bytes,
        state_bytes=job.state_bytes,
        period=config.anchor_period(mode),
        slots=config.records_in_flight,
    )
    private = peers is not None and job.replicas > peers.tolerate and not sliced
    sending = None if peers is None else _sending(job, peers, held, private, every)
    storing = _storing(job, held, log, mode)
    beyond = [one for one in (sending, storing) if one is not None]
    refused = [storing.problem] if storing.problem else []
    if peers is not None and job.nodes < peers.group_nodes:
        refused.append(f"peers: {peers.group_nodes} nodes of {job.nodes}")
    seconds = held.whole_bytes / job.copy_bytes_per_second
    if mode == "lazy":
        seconds = from_window_seconds(held, job.copy_bytes_per_second, job.redo_parameters_per_second)
    if sliced:  # then each node gets the others' slices
        seconds += job.node_parameters * job.state_bytes / peer_rate(job)
    own = Tier(name="memory", every_steps=max(1, every), lag_steps=0, restore_seconds=seconds)
    memory = node_memory(mode, held, peers=peers, private=private, residual_bytes=residual, nodes=job.nodes)
    scheme = Scheme(
        name=name,
        overhead=_local_waits(job, mode, held, every) + sum(one.overhead for one in beyond),
        tiers=(own, *(one.tier for one in beyond)),
        memory_bytes=memory.total,
        wire_bytes=0.0 if sending is None else sending.nbytes,
        disk_bytes=storing.nbytes,
    )
    kind = f"every {every} steps" if every else f"{mode}, T={held.period}"
    return Planned(
        job=job,
        scheme=scheme,
        choice=", ".join(filter(None, [choice, kind, storing.note])),
        memory=memory,
        config=config,
        exact=not (job.gpus_per_node and mode == "eager"),
        refused=tuple(refused),
        notes=(sending.note,) if sending is not None and sending.note else (),
    )


def snapshot_every(job: Job) -> int:
    """N of snapshots: Young's interval, and no less than what takes half of the overhead's budget."""
    stall = job.node_parameters * job.state_bytes / job.copy_bytes_per_second * (1 - job.copy_overlap)
    seconds = max(young_interval(stall, job.mtbf_seconds), stall / (job.overhead_budget / 2))
    return min(1_000_000, max(1, math.ceil(seconds / job.step_seconds)))


def _local_waits(job: Job, mode: RedoMode, held: Held, every: int) -> float:
    """Share of training time that copies into this node's memory cost, and redo that is slower than training."""
    if every:
        copying = held.whole_bytes / every / job.copy_bytes_per_second
        waits = max(copying * (1 - job.copy_overlap), copying - job.step_seconds)
    else:
        waits = _copies_waits(job, _link_time(job, held.parameters, held.period))
    if mode == "eager":
        waits += max(0.0, held.parameters / job.agent_redo_parameters_per_second - job.step_seconds)
    return waits / job.step_seconds


def _link_time(job: Job, parameters: float, period: int) -> LinkTime:
    each = parameters / job.copy_bytes_per_second
    return LinkTime(each * job.gradient_bytes, each * job.state_bytes / period, job.step_seconds, period)


def _copies_waits(job: Job, link: LinkTime) -> float:
    """Seconds of a step that wait for copies: what the link cannot hide, and what it never does."""
    return max(link.copy_seconds * (1 - job.copy_overlap), link.exposed_seconds)


def copies_in_words(job: Job, recommended: Planned | None) -> str:
    """What share of the copies from accelerators hides behind compute, and what would help; empty without any."""
    if not job.gpus_per_node:
        return ""
    config = None if recommended is None else recommended.config
    if config is None or config.redo == "snapshot":
        config = MemckptConfig(redo="lazy")
    period = config.anchor_period("eager" if config.redo == "eager" else "lazy")
    sliced = config.peers is not None and job.nodes == job.replicas >= SLICED_NODES
    link = _link_time(job, job.node_parameters / (job.nodes if sliced else 1), period)
    nbytes = link.copy_seconds * job.copy_bytes_per_second
    found = link.describe(nbytes, _copies_waits(job, link), job.gradient_bytes > 2, job.gpus_per_node)
    return f"each step recorded with T={period}: {found}"


def _storing(job: Job, held: Held, log: bool, mode: RedoMode) -> _Beyond:
    """Checkpoints as often as :class:`StorageConfig` lets them be written, with a log of records or without.

    Training waits for the copy that is written, but for eager redo's: docs/storage.md, "When a checkpoint is written".
    """
    settings = StorageConfig()
    persist = job.state_total_bytes / job.disk_bytes_per_second
    copy = held.whole_bytes / job.copy_bytes_per_second
    interval = max(settings.min_seconds, persist, copy / settings.overhead)
    bases = job.state_total_bytes * job.step_seconds / interval
    read = read_seconds(job)
    if not log:
        tier = storage_tier("storage", job, interval, persist, read)
        return _Beyond(tier, 0.0 if mode == "eager" else copy / interval, bases)
    record = job.parameters * (held.gradient_bytes + job.state_bytes / held.period)
    needed, available = record / job.step_seconds, job.disk_bytes_per_second
    if needed < available:  # bases have what records leave
        interval = max(interval, job.state_total_bytes / (available - needed))
    most = max(1, min(_MOST_BATCH_STEPS, int(_MOST_BATCH_BYTES / (record / job.nodes))))
    batch = min(most, math.ceil(1 / job.step_seconds))
    written = batch * record / available
    redone = min(interval, job.run_seconds) / job.step_seconds / 2
    restore = read + redone * record * job.replicas / available
    restore += redo_seconds(redone, held.parameters, job.redo_parameters_per_second)
    tier = msgspec.structs.replace(storage_tier("log", job, 0.0, written, restore), every_steps=batch)
    problem = "" if needed < available else f"storage: {needed / 1e9:.3g} GB/s of {available / 1e9:.3g} GB/s"
    waits = 0.0 if mode == "eager" else copy / interval
    return _Beyond(tier, waits, record + bases, f"batches of {batch}", problem)


def _config(
    job: Job, mode: RedoMode, period: int | None, peers: ErasureConfig | None, log: bool, every: int
) -> MemckptConfig:
    if peers is not None:
        peers = replace(peers, overhead=job.overhead_budget)
    budget = job.memory_budget_bytes
    return MemckptConfig(
        redo=mode,
        anchor_period_steps=period,
        snapshot_every_steps=every or MemckptConfig.snapshot_every_steps,
        agent=AgentConfig(memory_budget_bytes=None if budget is None else int(budget)),
        peers=peers,
        storage=StorageConfig(mode="log" if log else "replica"),
    )


@dataclass(frozen=True)
class Plan:
    """The schemes for a job, evaluated, those of users first; the best one of this product, and why, in words."""

    job: Job
    rows: tuple[Planned, ...]
    recommended: Planned | None
    reason: str


def make_plan(job: Job, others: Iterable[Callable[[Job], Planned]] = ()) -> Plan:
    """Evaluate all schemes for a job, and those of `others`, and recommend one.

    Recommended is, of this product's schemes that keep the budgets and do not change what is trained, the one with the
    highest ETTR among those within the budget of losses. Where several are within 0.1%, an exact one that protects
    every step, of the least memory.
    """
    ways = (unprotected, synchronous, asynchronous, *others, memory_only, copies, erasure, compressed, logged)
    rows = tuple(way(job) for way in ways)
    candidates = [row for row in rows if row.fits and row.config is not None and row.config.compression is None]
    if not candidates:
        own = [row for row in rows if row.config is not None and row.problems]
        reasons = "; ".join(f"{row.scheme.name}: {', '.join(row.problems)}" for row in own)
        return Plan(job, rows, None, f"no scheme keeps the budgets: {reasons}")
    kept = [row for row in candidates if row.keeps_memory] or candidates
    most = max(row.expectation.ettr for row in kept)
    alike = [row for row in kept if row.expectation.ettr >= most - SAME_ETTR]
    exact = [row for row in alike if row.exact] or alike
    exact = [row for row in exact if _every_step(row)] or exact
    recommended = min(exact, key=lambda row: (row.memory.total, row.monthly_loss or 0.0))
    words = [f"ETTR {recommended.expectation.ettr:.2%}"]
    if len(alike) == 1:
        words.append("the most within the budgets")
    else:
        words.append(f"within {SAME_ETTR:.1%} of memckpt's most, and of those the one of the least memory")
    if len(exact) < len(alike):
        words.append("that is exact and protects every step" if _every_step(recommended) else "that is exact")
    if not _every_step(recommended) and recommended.config is not None:
        words.append(f"which protects one step in {recommended.config.snapshot_every_steps}, as the budgets allow")
    if not recommended.keeps_memory:
        words.append(f"but memory is lost with a probability of {recommended.monthly_loss:.2g} a month")
    other = max((row for row in rows if row.config is None and row.fits), key=lambda row: row.expectation.ettr)
    if other.expectation.ettr > recommended.expectation.ettr:
        words.append(f"although {other.scheme.name} has {other.expectation.ettr:.2%}")
    return Plan(job, rows, recommended, ", ".join(words).replace(", that is", " that is"))


def _every_step(row: Planned) -> bool:
    """Whether each step is recorded, not each N-th state."""
    return row.config is not None and row.config.redo != "snapshot"
