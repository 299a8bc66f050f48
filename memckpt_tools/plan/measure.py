"""What ``memckpt plan`` measures: this machine, a link to another one, a job that runs."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from memckpt.cli.common import count, no_agent
from memckpt.cli.run_view import Looker, View
from memckpt.config import RedoMode
from memckpt.errors import AgentGoneError, AgentNotFoundError, ConfigurationError, PeerError, StorageError
from memckpt.processes.address import AgentAddress
from memckpt_tools.doctor.probes import job_nodes
from memckpt_tools.planning.footprint import STATE_BYTES, base_and_log_bytes, default_held

#: How long bytes are sent, and how long anything may be silent.
_LINK_SECONDS, _SILENT_SECONDS = 3.0, 10.0
_CHUNK = 1 << 20


def parse_address(option: str, text: str) -> tuple[str, int]:
    """HOST:PORT; an IPv6 address stands in brackets. Raises ConfigurationError."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigurationError(f"{option}: expected HOST:PORT with a port of 0 to 65535, found {text!r}")
    return host.strip("[]"), int(port)


def serve(host: str, port: int, ready: Callable[[str], object]) -> tuple[int, float]:
    """Accept one connection, and count the bytes that it sends, and the seconds; port 0: any. Raises PeerError.

    `ready` is called with the address, once it listens.
    """
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
            ready(f"{host}:{server.getsockname()[1]}")
            connection, _ = server.accept()
            with connection:
                connection.settimeout(_SILENT_SECONDS)
                buffer, received, started = bytearray(_CHUNK), 0, time.perf_counter()
                while count := connection.recv_into(buffer):
                    received += count
                connection.sendall(str(received).encode())
                return received, time.perf_counter() - started
    except OSError as error:
        raise PeerError(f"--listen {host}:{port}: {error}") from error


def link_rate(host: str, port: int, seconds: float = _LINK_SECONDS) -> float:
    """Bytes per second that a serving host takes (:func:`serve`). Raises PeerError if not all arrives."""
    chunk, sent = bytes(_CHUNK), 0
    try:
        with socket.create_connection((host, port), timeout=_SILENT_SECONDS) as connection:
            started = time.perf_counter()
            while time.perf_counter() - started < seconds:
                connection.sendall(chunk)
                sent += len(chunk)
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(64)
            passed = time.perf_counter() - started
    except OSError as error:
        raise PeerError(f"--link {host}:{port}: {error}; start `memckpt plan --listen` there") from error
    if answer != str(sent).encode():
        raise PeerError(f"--link {host}:{port}: expected that {sent} bytes arrive, found {answer!r}")
    return sent / passed


_COPY_BYTES, _ENCODE_BYTES, _DISK_BYTES = 256 << 20, 64 << 20, 256 << 20
_REDO_ELEMENTS = 8 << 20
#: Time after which a rate is not measured again.
_SECONDS = 1.5


@dataclass
class Measured:
    """What was measured: fields of a :class:`~memckpt_tools.planning.job.Job`, and the same in words."""

    facts: dict[str, Any]
    notes: list[str]


def measure_machine(directory: Path, link: str | None, tell: Callable[[str], object]) -> Measured:
    """Time this machine: a copy in memory, redo of AdamW, encoding, writing a file, and a link if one is named.

    Rates are of one thread for copy and encode, of torch's threads for redo. Copies from an accelerator are not
    measured: the rate of a copy in memory counts for machines without one. A file is written to `directory`, and
    deleted. `link` is HOST:PORT of a `memckpt plan --listen`. `tell` is called with what is being measured. Raises
    ConfigurationError, StorageError, PeerError.
    """
    address = None if link is None else parse_address("--link", link)
    if not directory.is_dir():
        raise ConfigurationError(f"--directory: expected a directory, found {directory}")
    tell("measuring: copy in memory")
    copied = copy_rate()
    tell("measuring: redo of AdamW")
    redone, on_accelerator = redo_rate()
    tell("measuring: encoding")
    encoded = encode_rate()
    tell(f"measuring: disk at {directory}")
    written = disk_rate(directory)
    facts: dict[str, Any] = {
        "disk_bytes_per_second": written,
        "encode_bytes_per_second": encoded,
        "agent_redo_parameters_per_second": redone,
    }
    notes = [
        f"measured: copy in memory {copied / 1e9:.2f} GB/s (one thread)",
        f"measured: redo of AdamW {redone / 1e6:.0f}M parameters/s on the CPU",
        f"measured: encoding with k=4, m=2 {encoded / 1e9:.2f} GB/s (one thread)",
        f"measured: disk {written / 1e9:.2f} GB/s with fsync, of this machine alone",
    ]
    if not on_accelerator:
        facts |= {"copy_bytes_per_second": copied, "redo_parameters_per_second": redone, "gpus_per_node": 0}
    if address is not None:
        tell(f"measuring: link to {link}")
        sent = link_rate(*address)
        facts["network_bytes_per_second"] = sent
        notes.append(f"measured: link to {link} {sent / 1e9:.2f} GB/s (one connection, not encrypted)")
    return Measured(facts, notes)


def _rate(amount: float, action: Callable[[], object]) -> float:
    """Amount per second of the fastest of several turns, at least two."""
    best, started = 0.0, time.perf_counter()
    turns = 0
    while turns < 2 or time.perf_counter() - started < _SECONDS:
        before = time.perf_counter()
        action()
        best = max(best, amount / max(time.perf_counter() - before, 1e-9))
        turns += 1
    return best


def copy_rate(nbytes: int = _COPY_BYTES) -> float:
    """Bytes per second that one thread copies in memory."""
    import numpy as np

    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    return _rate(nbytes, lambda: np.copyto(target, source))


def encode_rate(nbytes: int = _ENCODE_BYTES) -> float:
    """Bytes per second that one thread encodes with k = 4, m = 2."""
    import numpy as np

    from memckpt.replication.coding.code import STRIPE_BYTES, Code

    source = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8).data
    with closing(Code(4, 2)) as code:

        def encode() -> None:
            for start in range(0, nbytes, STRIPE_BYTES):
                code.encode(source[start : start + STRIPE_BYTES])

        return _rate(nbytes, encode)


def redo_rate(elements: int = _REDO_ELEMENTS) -> tuple[float, bool]:
    """Parameters per second that AdamW advances by a step on the CPU, and whether there is an accelerator."""
    import torch

    parameter = torch.nn.Parameter(torch.ones(elements))
    parameter.grad = torch.ones(elements)
    optimizer = torch.optim.AdamW([parameter])
    optimizer.step()
    return _rate(elements, optimizer.step), torch.accelerator.is_available()


def disk_rate(directory: Path, nbytes: int = _DISK_BYTES) -> float:
    """Bytes per second of a file that is written and synced. Raises StorageError, also where room is too little."""
    from memckpt.storage.local_store import LocalStore
    from memckpt_tools.doctor.probes import try_disk

    found = try_disk(LocalStore(directory), nbytes)
    if found.bytes_per_second is None:
        raise StorageError(f"--directory {directory}: {found.problem or 'too little room to measure a rate'}")
    return found.bytes_per_second


#: How long steps are watched for, and how often it is looked.
_WATCH_SECONDS, _LOOK_SECONDS = 10.0, 0.2


def observe_run(run: Path, node: str | None, state_bytes: float) -> Measured:
    """Ask a run's agent twice, some steps apart; `state_bytes`: of a parameter and its optimizer state."""
    looker = Looker(AgentAddress.of(run, node), None)
    before = time.monotonic()
    first = _view_of(looker)
    started = time.monotonic()
    last, looked = first, before
    while _steps(first, last) < 5 and time.monotonic() - started < _WATCH_SECONDS:
        select.select([], [], [], _LOOK_SECONDS)
        looked = time.monotonic()
        last = _view_of(looker)
    return describe(first, last, looked - before, state_bytes)


def _view_of(looker: Looker) -> View:
    view = looker.view_run()
    if view.agent_problem:
        raise AgentGoneError(view.agent_problem)
    if view.agent is None:
        raise AgentNotFoundError(no_agent(view.address))
    return view


def _steps(first: View, last: View) -> int:
    if first.agent is None or last.agent is None or first.agent.step is None or last.agent.step is None:
        return 0
    return last.agent.step - first.agent.step


def describe(first: View, last: View, seconds: float, state_bytes: float) -> Measured:
    """What two looks at a run, `seconds` apart, say of its job; `state_bytes` as in :func:`observe_run`."""
    seen, agent, stored = Measured({}, []), last.agent, last.stored
    assert agent is not None
    nodes = job_nodes(agent)
    mode: Any = agent.mode
    seen.facts["nodes"] = nodes
    if agent.trainers:
        seen.facts["gpus_per_node"] = agent.accelerators
        where = "on accelerators" if agent.accelerators else "on CPUs"
        ranks = count(len(agent.trainers), "rank")
        seen.notes.append(f"run: {count(nodes, 'node')} known, {ranks} on this one, {where}")
    if stored is not None and stored.nbytes:
        seen.facts["parameters"] = stored.nbytes / state_bytes
        seen.notes.append(f"run: {stored.nbytes / state_bytes:.4g} parameters, by the newest checkpoint's size")
    elif agent.held_bytes and mode in get_args(RedoMode):  # T and D of a run are not shown
        held = agent.held_bytes / (base_and_log_bytes(mode, default_held(mode)) * state_bytes / STATE_BYTES)
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
    if agent.stall_ms and mode in ("lazy", "eager") and "parameters" in seen.facts:
        record = seen.facts["parameters"] / nodes * default_held(mode).record_bytes * state_bytes / STATE_BYTES
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
