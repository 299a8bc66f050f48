"""Facts that a live run shows of itself, for ``memckpt plan --run``."""

from __future__ import annotations

import select
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memckpt.cli.common import count, no_agent
from memckpt.cli.run_view import Looker, View
from memckpt.errors import AgentGoneError, AgentNotFoundError
from memckpt.processes.address import AgentAddress
from memckpt_tools.doctor.probes import job_nodes

#: How long steps are watched for, and how often it is looked.
_WATCH_SECONDS, _LOOK_SECONDS = 10.0, 0.2
#: T and D of a run are not shown. With the defaults, bytes of base and log, and of a record, for each parameter with
#: Adam and fp32.
_HELD_BYTES = {"lazy": 60.5, "eager": 25.125, "snapshot": 24.0}
_RECORD_BYTES = {"lazy": 5.5, "eager": 4.375}


@dataclass
class Seen:
    """What was seen.

    Attributes:
        facts: fields of a :class:`~memckpt_tools.planning.job.Job`.
        notes: the same in words.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def observe_run(run: Path, node: str | None, state_bytes: float) -> Seen:
    """Ask a run's agent twice, some steps apart.

    Args:
        run: the run directory. node: the agent's node; None: this one.
        state_bytes: bytes of a parameter and its optimizer state.

    Raises:
        AgentNotFoundError: no agent answers.
    """
    looker = Looker(AgentAddress.of(run, node), None)
    before = time.monotonic()
    first = _look(looker)
    started = time.monotonic()
    last, looked = first, before
    while _steps(first, last) < 5 and time.monotonic() - started < _WATCH_SECONDS:
        select.select([], [], [], _LOOK_SECONDS)
        looked = time.monotonic()
        last = _look(looker)
    return describe(first, last, looked - before, state_bytes)


def _look(looker: Looker) -> View:
    view = looker.look()
    if view.agent_problem:
        raise AgentGoneError(view.agent_problem)
    if view.agent is None:
        raise AgentNotFoundError(no_agent(view.address))
    return view


def _steps(first: View, last: View) -> int:
    if first.agent is None or last.agent is None or first.agent.step is None or last.agent.step is None:
        return 0
    return last.agent.step - first.agent.step


def describe(first: View, last: View, seconds: float, state_bytes: float) -> Seen:
    """What two looks at a run say of its job.

    Args:
        first, last: the looks. seconds: time between them.
        state_bytes: bytes of a parameter and its optimizer state.
    """
    seen, agent, stored = Seen(), last.agent, last.stored
    assert agent is not None
    nodes = job_nodes(agent)
    seen.facts["nodes"] = nodes
    if agent.trainers:
        seen.facts["gpus_per_node"] = agent.accelerators
        where = "on accelerators" if agent.accelerators else "on CPUs"
        ranks = count(len(agent.trainers), "rank")
        seen.notes.append(f"run: {count(nodes, 'node')} known, {ranks} on this one, {where}")
    if stored is not None and stored.nbytes:
        seen.facts["parameters"] = stored.nbytes / state_bytes
        seen.notes.append(f"run: {stored.nbytes / state_bytes:.4g} parameters, by the newest checkpoint's size")
    elif agent.held_bytes and agent.mode in _HELD_BYTES:
        held = agent.held_bytes / (_HELD_BYTES[agent.mode] * state_bytes / 12.0)
        seen.facts["parameters"] = held * nodes
        seen.notes.append(f"run: about {held * nodes:.4g} parameters, by what the agent holds (T, D as by default)")
    steps = _steps(first, last)
    if steps > 0 and first.agent is not None:
        ages = [one.seconds_since_commit or 0.0 for one in (first.agent, agent)]
        stall = (agent.stall_ms or 0.0) / 1e3
        step = (seconds + ages[0] - ages[1]) / steps
        seen.facts["step_seconds"] = max(step - stall, step / 10)
        seen.notes.append(f"run: {step:.4g} s a step, over {steps} steps, of which protection takes {stall:.2g} s")
    else:
        seen.notes.append("run: no step was committed while it was watched: --step-seconds is as by default")
    if agent.stall_ms and agent.mode in _RECORD_BYTES and "parameters" in seen.facts:
        record = seen.facts["parameters"] / nodes * _RECORD_BYTES[agent.mode] * state_bytes / 12.0
        rate = record / (agent.stall_ms / 1e3)
        seen.facts |= {"copy_bytes_per_second": rate, "copy_overlap": 0.0}
        seen.notes.append(f"run: protection takes as long as copying records at {rate / 1e9:.2f} GB/s")
    if agent.redo_seconds_per_record and "parameters" in seen.facts:
        rate = seen.facts["parameters"] / nodes / agent.redo_seconds_per_record
        seen.facts["agent_redo_parameters_per_second"] = rate
        seen.notes.append(f"run: the agent redoes {rate / 1e6:.0f}M parameters/s")
    if agent.storage is not None and agent.storage.bytes_per_second:
        rate = agent.storage.bytes_per_second * nodes
        seen.facts["disk_bytes_per_second"] = rate
        seen.notes.append(f"run: storage takes {rate / 1e9:.2f} GB/s, by this node's last write")
    return seen
