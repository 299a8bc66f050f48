"""Rows of the papers: how others protect a job, each by the formulas of its paper. Pure.

Papers give few absolute figures, and formulas for some columns only. For the others a row takes this product's own:

- Copies to the host make training wait for what `copy_overlap` leaves of them; sends take idle spans of the network.
- A failure loses half an interval and what was not complete yet ("ETTR, aka, how good is the training goodput").
- A restore copies the state back to the accelerators, and reads storage as :func:`read_seconds` has it.

Where a paper does not say how often it saves, its interval is the shortest one within the job's budget of overhead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from memckpt.user_messages import seconds_text
from memckpt_tools.planning.footprint import NodeMemory
from memckpt_tools.planning.job import Job
from memckpt_tools.planning.scheme import Planned, Scheme, Tier, beyond_rate, peer_rate, storage_tier
from memckpt_tools.planning.schemes import node_state_bytes, read_seconds, young_interval

#: Seconds between checkpoints in storage behind those in memory: what Gemini's summary finds usual for storage.
STORED_EVERY_SECONDS = 3 * 3600.0
#: Share of its gradient that each rank sends with LowDiff (section VII-A), and bytes of a value and its index.
RATIO, _ELEMENT_BYTES = 0.01, 8


def gemini(job: Job, copies: int = 2) -> Planned:
    """Plan Gemini: each node's state in the memory of `copies` nodes, itself included; groups of so many nodes.

    Sources: the authors' summary of Wang et al., SOSP 2023. "Optimal checkpoint placement": groups of M. "Interleaved
    communication": sends in idle spans of the network; what a node receives passes an accelerator, and is copied from
    there as its own state is. Two generations are held, as in lm-resiliency's slots, by the same author.
    """
    state = node_state_bytes(job)
    copied = copies * state / job.copy_bytes_per_second
    return _in_memory(
        job,
        "Gemini",
        f"{copies} copies",
        waits=copied * (1 - job.copy_overlap),
        copied=copied,
        sent=(copies - 1) * state,
        rate=job.network_bytes_per_second,
        memory=NodeMemory(agent=2 * state, replicator=2 * (copies - 1) * state),
        group=_Group(copies, copies - 1),
        fetch=state / job.network_bytes_per_second,
    )


def eccheck(job: Job, data: int = 2, parity: int = 2) -> Planned:
    """Plan ECCheck: states of groups of k + m nodes as k data and m parity chunks, one on each node.

    Sources: section III-A (training waits for the copy to the host; the rest is asynchronous). III-B (a chunk is
    (k + m)/k of a node's state; any m nodes of a group may be lost; a recovery that decodes has the steps of encoding).
    IV-B and V-F (m x s x W bytes on the wire for W workers of s bytes: m states for each node), IV-B.3 (idle spans).
    """
    state = node_state_bytes(job)
    nodes = data + parity
    chunk = nodes / data * state
    return _in_memory(
        job,
        "ECCheck",
        f"k={data}, m={parity}",
        waits=state / job.copy_bytes_per_second,
        copied=state / job.copy_bytes_per_second,
        sent=parity * state,
        rate=peer_rate(job),
        memory=NodeMemory(agent=2 * state, replicator=2 * (chunk - state), state_copy=state),
        group=_Group(nodes, parity),
        # Without a loss data nodes send the others their part; else all encode, reduce and send as for a checkpoint.
        hand_out=(chunk - state) / job.network_bytes_per_second,
        fetch=parity * state / peer_rate(job),
    )


class _Group(NamedTuple):
    nodes: int
    tolerates: int


def _in_memory(
    job: Job,
    name: str,
    choice: str,
    *,
    waits: float,
    copied: float,
    sent: float,
    rate: float,
    memory: NodeMemory,
    group: _Group,
    fetch: float,
    hand_out: float = 0.0,
) -> Planned:
    """Plan states in memory of several nodes, as often as links and the budget of overhead allow; storage behind them.

    `waits`: seconds that training waits for each state; `copied`, `sent`: seconds of copies and bytes sent for it.
    `fetch`, `hand_out`: seconds until a node has its state, with lost nodes and without.
    """
    free = job.step_seconds * job.network_idle_share
    complete = max(copied / job.step_seconds, sent / rate / free)  # in steps
    every = max(1, math.ceil(complete), math.ceil(waits / (job.overhead_budget * job.step_seconds)))
    back = node_state_bytes(job) / job.copy_bytes_per_second
    rebuild = (every + complete) * job.step_seconds  # until the next state is complete
    persist = job.state_total_bytes / job.disk_bytes_per_second
    interval = max(STORED_EVERY_SECONDS, persist)
    own = Tier(name="memory", every_steps=every, lag_steps=complete, restore_seconds=hand_out + back)
    peers = Tier(
        name="peers",
        every_steps=every,
        lag_steps=complete,
        restore_seconds=fetch + back,
        rebuild_seconds=rebuild,
        group_nodes=group.nodes,
        tolerates=group.tolerates,
    )
    refused = () if job.nodes >= group.nodes else (f"peers: {group.nodes} nodes of {job.nodes}",)
    return _row(
        job,
        name,
        f"{choice}, every {_steps(every)}",
        overhead=waits / job.step_seconds / every,
        tiers=(own, peers, storage_tier("storage", job, interval, persist, read_seconds(job))),
        memory=memory,
        wire=sent / every,
        disk=job.state_total_bytes * job.step_seconds / interval,
        refused=refused,
    )


def reft(job: Job) -> Planned:
    """Plan REFT: replicas snapshot a slice each, with parity over their nodes (RAIM5); one node of a group may be lost.

    Sources: section 4.1 (each of R nodes copies 1/R). 4.2 (a failure makes the snapshot processes write a checkpoint,
    from which training begins). 4.3 (parity doubles what is copied, and is made without traffic), 6.2 "Memory usage"
    (at most three times the slice). Intervals by appendix A, equations 5, 9 and 11: sqrt(2 x wait / rate), of all
    failures for snapshots. For checkpoints of those that memory does not survive (equation 7).
    """
    nodes = job.replicas
    piece = node_state_bytes(job) / nodes
    copied = 2 * piece / job.copy_bytes_per_second
    waits = copied * (1 - job.copy_overlap)
    seconds = max(copied, young_interval(waits, job.mtbf_seconds))
    every = max(1, math.ceil(seconds / job.step_seconds))
    persist = job.state_total_bytes / job.disk_bytes_per_second
    tier = Tier(
        name="memory",
        every_steps=every,
        lag_steps=copied / job.step_seconds,
        restore_seconds=persist + read_seconds(job),
        rebuild_seconds=every * job.step_seconds + copied,
        group_nodes=nodes,
        tolerates=min(1, nodes - 1),
    )
    overhead = waits / job.step_seconds / every
    rate = beyond_rate(job, Scheme(name="", overhead=overhead, tiers=(tier,))) + job.failures.cluster
    interval = max(persist, min(job.run_seconds, young_interval(waits, 1 / rate) if rate else math.inf))
    return _row(
        job,
        "REFT",
        f"slices of 1/{nodes}, every {_steps(every)}",
        overhead=overhead,
        tiers=(tier, storage_tier("storage", job, interval, persist, read_seconds(job))),
        memory=NodeMemory(agent=3 * piece),
        disk=job.state_total_bytes * job.step_seconds / interval,
        refused=() if nodes > 1 else ("replicas: expected 2 or more, whose slices protect each other",),
    )


def lowdiff(job: Job) -> Planned:
    """Plan LowDiff: the compressed gradients of each step in storage, in batches, and full checkpoints behind them.

    Sources: section IV-A (what all ranks have sent is written), IV-B (a batch is one sum, applied at once). Section
    IV-C, equation 3: a failure costs half a batch, loading a full checkpoint, and merging half of the batches since;
    writing one takes training S/W, 1/f apart. Equation 5 has the best: f = (R_D W^2 / (4 S^2 M^2))^(1/3), b = (2 S R_D
    M / W)^(1/3). M is the time between failures and R_D that of a merge: here reading one gradient, and redoing one
    step.
    """
    disk = job.disk_bytes_per_second
    ranks = job.nodes * max(1, job.gpus_per_node)
    each = min(job.gradient_bytes, RATIO * ranks * _ELEMENT_BYTES)
    differential = job.parameters * each
    write, merge = (
        job.state_total_bytes / disk,
        differential / disk + job.node_parameters / job.redo_parameters_per_second,
    )
    # A batch is whole steps, and no batch takes longer to write than to fill.
    batch = max(1, round((2 * write * merge * job.mtbf_seconds) ** (1 / 3) / job.step_seconds))
    batch = max(batch, math.ceil(differential / disk / job.step_seconds))
    full = max((4 * (write * job.mtbf_seconds) ** 2 / merge) ** (1 / 3), write, batch * job.step_seconds)
    merges = max(0.0, full / (batch * job.step_seconds) - 1) / 2
    copied = job.node_parameters * each / job.copy_bytes_per_second
    tier = Tier(
        name="storage",
        every_steps=batch,
        lag_steps=differential / disk / job.step_seconds,
        restore_seconds=read_seconds(job) + merges * merge,
        survives_cluster=True,
    )
    return _row(
        job,
        "LowDiff",
        f"top {RATIO:.0%}, batches of {batch}, full every {seconds_text(full)}",
        overhead=write / full + copied * (1 - job.copy_overlap) / job.step_seconds,
        tiers=(tier,),
        memory=NodeMemory(agent=job.node_parameters * each),
        disk=differential / batch + job.state_total_bytes * job.step_seconds / full,
        exact=False,
        refused=_data_parallel(job),
        notes=("needs a training with compressed gradients; a batch is their sum, which is not Adam's",),
    )


def lowdiff_plus(job: Job) -> Planned:
    """Plan LowDiff+: uncompressed gradients, layer by layer, to a replica that CPUs advance; persisted meanwhile.

    Sources: section V-A (gradients are copied beside the backward). V-C (the replica holds each step; failures of
    processes are served by it, those of nodes by storage, which is written as often as that takes). Gradients wait for
    a replica that is slower than training; the paper finds that none is.
    """
    state = node_state_bytes(job)
    copied = job.node_parameters * job.gradient_bytes / job.copy_bytes_per_second
    redo = job.node_parameters / job.agent_redo_parameters_per_second
    waits = max(copied * (1 - job.copy_overlap), copied - job.step_seconds) + max(0.0, redo - job.step_seconds)
    slowed = job.step_seconds + waits
    persist = job.state_total_bytes / job.disk_bytes_per_second
    every = max(1, math.ceil(persist / slowed))
    return _row(
        job,
        "LowDiff+",
        f"replica, stored every {_steps(every)}",
        overhead=waits / job.step_seconds,
        tiers=(
            Tier(name="memory", every_steps=1, lag_steps=0, restore_seconds=state / job.copy_bytes_per_second),
            storage_tier("storage", job, every * job.step_seconds, persist, read_seconds(job)),
        ),
        memory=NodeMemory(agent=state + job.node_parameters * job.gradient_bytes, state_copy=state),
        disk=job.state_total_bytes / every,
        exact=not job.gpus_per_node,
        refused=_data_parallel(job),
    )


def checkfreq(job: Job) -> Planned:
    """Plan CheckFreq: snapshots beside compute, persisted meanwhile, as often as both allow.

    Sources: Mohan et al., FAST 2021, and ``cf_iterator.py`` of its code. The interval is what persisting takes, in
    steps, and grows while the measured overhead is above a limit (3.5% there). The job's budget is that limit here.
    """
    state = node_state_bytes(job)
    copied = state / job.copy_bytes_per_second
    waits = max(copied * (1 - job.copy_overlap), copied - job.step_seconds)
    persist = job.state_total_bytes / job.disk_bytes_per_second
    every = max(1, math.ceil(persist / job.step_seconds), math.ceil(waits / (job.overhead_budget * job.step_seconds)))
    return _row(
        job,
        "CheckFreq",
        f"every {_steps(every)}",
        overhead=waits / job.step_seconds / every,
        tiers=(storage_tier("storage", job, every * job.step_seconds, persist, read_seconds(job)),),
        memory=NodeMemory(agent=0.0, state_copy=state),
        disk=job.state_total_bytes / every,
    )


#: All of them, by year. ``dcp.async_save`` is among the baselines of every plan (:mod:`.schemes`).
PAPERS: tuple[Callable[[Job], Planned], ...] = (checkfreq, gemini, reft, eccheck, lowdiff, lowdiff_plus)


def _data_parallel(job: Job) -> tuple[str, ...]:
    return () if job.replicas == job.nodes else ("replicas: expected data parallelism (replicas = nodes)",)


def _steps(number: int) -> str:
    return "step" if number == 1 else f"{number:,} steps"


def _row(
    job: Job,
    name: str,
    choice: str,
    *,
    overhead: float,
    tiers: tuple[Tier, ...],
    memory: NodeMemory,
    wire: float = 0.0,
    disk: float = 0.0,
    exact: bool = True,
    refused: tuple[str, ...] = (),
    notes: tuple[str, ...] = (),
) -> Planned:
    scheme = Scheme(
        name=name, overhead=overhead, tiers=tiers, memory_bytes=memory.total, wire_bytes=wire, disk_bytes=disk
    )
    return Planned(job=job, scheme=scheme, choice=choice, memory=memory, exact=exact, refused=refused, notes=notes)
