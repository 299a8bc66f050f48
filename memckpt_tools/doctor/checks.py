"""What ``memckpt doctor`` concludes from facts on this machine and on storage. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args
from urllib.parse import urlsplit

from memckpt.cli.common import count
from memckpt.config import ErasureConfig, MemckptConfig, RedoMode, StorageConfig
from memckpt.protocol.descriptors import LANE_DESCRIPTORS, PEER_DESCRIPTORS
from memckpt.user_messages import nbytes_text, short_number
from memckpt_tools.planning.footprint import STATE_BYTES, base_and_log_bytes, default_held

Outcome = Literal["ok", "warning", "problem"]

OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 6)
OLDEST_LIGHTNING = (2, 5)

#: Bytes of memory below which hardly any model fits beside the agent's interpreter.
_LITTLE_MEMORY = 1 << 30
#: Descriptors that an agent or replicator has open without peers.
_OWN_DESCRIPTORS = 128
#: Number of nodes for which the limit on descriptors should suffice.
_FEW_NODES = 256


@dataclass(frozen=True)
class Check:
    """One finding, and its remedy unless the outcome is ok."""

    name: str
    outcome: Outcome
    text: str
    remedy: str = ""


def _ok_without(problem: str, name: str, text: str, remedy: str) -> Check:
    """A problem with its remedy; that all is well where `problem` is empty."""
    return Check(name, "problem", problem, remedy) if problem else Check(name, "ok", text)


def _version(text: str) -> tuple[int, ...]:
    """The release numbers: (2, 13, 0) for ``2.13.0+cpu``."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


# Software


def check_python(version: tuple[int, ...]) -> Check:
    old = _dotted(version) if version < OLDEST_PYTHON else ""
    return _ok_without(old, "Python", _dotted(version), f"Python {_dotted(OLDEST_PYTHON)} or newer")


def check_torch(version: str | None, import_error: str) -> Check:
    """`import_error`: the error of importing torch; empty: none."""
    if version is not None and import_error:
        return Check("torch", "problem", f"{version} cannot be imported: {import_error}", "install torch anew")
    found = version or "not installed"
    old = found if version is None or _version(version) < OLDEST_TORCH else ""
    return _ok_without(old, "torch", found, f"pip install 'torch>={_dotted(OLDEST_TORCH)}'")


def check_lightning(version: str | None, old_name: str | None) -> Check:
    """`old_name`: version of the distribution pytorch-lightning, whose classes are different ones."""
    install = f"pip install 'lightning>={_dotted(OLDEST_LIGHTNING)}'"
    if version is not None:
        return _ok_without(version if _version(version) < OLDEST_LIGHTNING else "", "Lightning", version, install)
    if old_name is not None:
        text = f"only pytorch-lightning {old_name} is installed; the callback needs lightning"
        return Check("Lightning", "warning", text, f"{install}, and import lightning.pytorch")
    return Check("Lightning", "ok", f"not installed; for the callback: {install}")


def check_optional(name: str, version: str | None, purpose: str) -> Check:
    """An optional package."""
    return Check(name, "ok", version or f"not installed; needed for {purpose}: pip install {name}")


def check_settings(problem: str) -> Check:
    """Settings from the environment; `problem`: the error in them."""
    remedy = "see docs/configuration.md#environment"
    return _ok_without(problem, "settings", "the environment's settings are valid", remedy)


def check_erasure(backends: tuple[str, ...], problem: str, peers: ErasureConfig | None) -> Check:
    """Whether the erasure code is available; that is no problem of peers that need none. `problem`: pyeclib's error."""
    backend = ErasureConfig().backend if peers is None else peers.backend
    coded = peers is not None and peers.data > 1 and peers.tolerate > 1
    outcome: Outcome = "problem" if coded else "warning"
    if problem:
        return Check("erasure code", outcome, f"pyeclib: {problem}", "pip install --force-reinstall pyeclib")
    if backend not in backends:
        text = f"{backend} is not available; available: {', '.join(backends) or 'none'}"
        return Check("erasure code", outcome, text, "ErasureConfig(backend=...) with one of these")
    return Check("erasure code", "ok", f"{backend}, and {count(len(backends) - 1, 'other')}")


def check_transport(version: str, curve: bool, problem: str, peers: ErasureConfig | None) -> Check:
    """Whether ZeroMQ is available: its `version`, whether it has `curve`, or pyzmq's import error."""
    if problem:
        outcome: Outcome = "warning" if peers is None else "problem"
        return Check("peers' transport", outcome, f"pyzmq: {problem}", "pip install --force-reinstall pyzmq")
    if not curve:
        plain = peers is None or peers.security == "plain"
        remedy = 'pip install pyzmq as a wheel; or security="plain", where everybody on the network may read'
        return Check("peers' transport", "warning" if plain else "problem", f"ZeroMQ {version} without CURVE", remedy)
    return Check("peers' transport", "ok", f"ZeroMQ {version} with CURVE")


# The machine


def bytes_per_parameter(mode: RedoMode) -> float:
    """Bytes per parameter of base and log with the default settings, and of the copy that is written to storage."""
    return base_and_log_bytes(mode, default_held(mode)) + STATE_BYTES


def check_memory(available: int, limit: int | None) -> Check:
    """`available`: bytes; `limit`: bytes of the tightest control group; None: unlimited."""
    under = "" if limit is None else f" (cgroup limit {nbytes_text(limit)})"
    room = {mode: available * 0.95 / bytes_per_parameter(mode) / 1e6 for mode in get_args(RedoMode)}
    text = (
        f"{nbytes_text(available)} available{under}; minus the memory of training itself, that is room for "
        f"{room['lazy']:.0f}M parameters (lazy), {room['eager']:.0f}M (eager) or {room['snapshot']:.0f}M (snapshot), "
        "fp32 with Adam"
    )
    if available < _LITTLE_MEMORY:
        return Check("memory", "warning", text, "end other processes, or give the job more memory")
    return Check("memory", "ok", text)


def check_kernel(release: str, missing: tuple[str, ...]) -> Check:
    """`missing`: features that were tried and are unavailable."""
    problem = f"{release} without {', '.join(missing)}" if missing else ""
    remedy = "Linux 5.3 or newer with /proc; in a sandbox, allow these calls"
    return _ok_without(problem, "kernel", f"{release} with /proc, pidfd and memfd", remedy)


def check_sockets(problem: str) -> Check:
    """`problem`: the error of listening on an agent's socket; empty: none."""
    remedy = "in a sandbox, allow Unix sockets of type seqpacket in the abstract namespace"
    return _ok_without(problem, "agent's socket", "can be bound", remedy)


def expected_redo(cores: float, threads: int, on_accelerator: bool) -> tuple[RedoMode, str]:
    """The mode that ``redo="auto"`` chooses for one rank of a model that is not small, and the reason.

    On an accelerator this holds if the memory suffices, which depends on the model.
    """
    if on_accelerator:
        return "lazy", "exact on an accelerator, and takes no core"
    if cores - threads >= MemckptConfig().agent.threads:
        return "eager", f"training uses {threads} of {cores:g} cores"
    return "lazy", f"training uses all of the {cores:g} cores"


def check_cores(affinity: int, quota: float | None, threads: int, on_accelerator: bool) -> Check:
    """`threads`: number of torch's threads; `quota`: the control group's limit in cores, None: unlimited."""
    cores = float(affinity) if quota is None else min(affinity, quota)
    limited = "" if quota is None or quota >= affinity else f" (of {affinity}, by cgroup quota)"
    mode, reason = expected_redo(cores, threads, on_accelerator)
    text = f'{cores:g} cores{limited}; redo="auto" takes {mode} for one rank: {reason}'
    if threads > cores:
        remedy = f"OMP_NUM_THREADS={max(1, int(cores))}"
        return Check("cores", "warning", f"{text}; torch computes with {threads} threads on them", remedy)
    return Check("cores", "ok", text)


def check_survival(slurm_job: str | None, unit: str | None, container: bool) -> Check:
    """Whether the environment ends the agent together with the trainer. `unit`: systemd service of this process."""
    remedy = "run `memckpt agent` beside the job; see docs/operations.md#what-kills-the-agent-cgroups"
    if slurm_job is not None:
        return Check("agent's life", "warning", "in a Slurm job: the agent ends with the job step", remedy)
    if unit is not None:
        return Check("agent's life", "warning", f"in {unit}: the agent ends when that unit stops", remedy)
    if container:
        return Check("agent's life", "ok", "in a container: memory is lost with it, storage on a volume is not")
    return Check("agent's life", "ok", "found nothing that would end the agent together with the trainer")


def check_agent(pid: int | None, problem: str) -> Check:
    """The run's agent: its `pid`, None: none answers; `problem`: the error of asking it."""
    text = "none answers" if pid is None else f"pid {pid} answers"
    return _ok_without(problem, "agent", text, "look at its log; `memckpt stop` ends it")


def check_alarms(alarms: Sequence[str]) -> Check:
    """Alarms of the live agent."""
    return _ok_without("; ".join(alarms), "agent's alarms", "none", "see docs/troubleshooting.md, and the agent's log")


def check_advice(line: str, reason: str) -> Check:
    """Setting that the running training advises, and why."""
    if line:
        return Check("settings of the run", "warning", reason, f"{line}, in MemckptConfig, from the next start on")
    return Check("settings of the run", "ok", "no other ones are known to be better")


def check_descriptors(soft: int | None, hard: int | None, nodes: int, peers: ErasureConfig | None) -> Check:
    """Whether the limit on open files suffices for the replicator of rank 0's node, which connects to all others.

    None: unlimited. Agents and replicators raise their `soft` limit to the `hard` one. One node: one, or unknown.
    """
    if hard is None:
        return Check("open files", "ok", "unlimited")
    own = _OWN_DESCRIPTORS + LANE_DESCRIPTORS * ((peers or ErasureConfig()).group_nodes - 1)
    reach = max(0, (hard - own) // PEER_DESCRIPTORS) + 1
    text = f"{soft if soft is not None else 'unlimited'}, raised to {hard}: enough for {reach} nodes with peers"
    remedy = f"ulimit -Hn {own + PEER_DESCRIPTORS * nodes} or more; LimitNOFILE= in a systemd unit"
    if nodes > reach:
        return Check("open files", "problem", f"{text}; this job has {nodes}", remedy)
    if reach < _FEW_NODES and peers is not None:
        remedy = "ulimit -Hn 4096 or more before jobs of more nodes; LimitNOFILE= in a systemd unit"
        return Check("open files", "warning", text, remedy)
    return Check("open files", "ok", text)


_LITTLE_ROOM = 5 << 30
#: Bytes per second; at a lower rate a checkpoint of 100M parameters takes more than half a minute.
_SLOW_DISK = 40e6
_LOST_WITH = {
    "tmpfs": "the machine's memory",
    "ramfs": "the machine's memory",
    "overlay": "the container",
    "aufs": "the container",
}
_DRIVERS = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}


def check_driver(url: str, installed: Mapping[str, str | None]) -> Check | None:
    """The package that opens an object store; None: a directory, or a scheme without a known package."""
    driver = _DRIVERS.get(urlsplit(url).scheme)
    if driver is None:
        return None
    version = installed.get(driver)
    missing = "" if version else f"not installed; {url} needs it"
    return _ok_without(missing, driver, version or "", f"pip install {driver}")


@dataclass(frozen=True)
class StoreFacts:
    """Findings in a run's storage."""

    url: str
    problem: str = ""  #: why it could not be read; empty if it could
    foreign: str = ""  #: a message that it belongs to another run; else empty
    checkpoints: int = 0  #: number of complete ones
    step: int | None = None  #: newest step that can be produced; None: none
    nbytes: int = 0  #: of the newest checkpoint
    wrong: tuple[str, ...] = ()  #: messages about damaged, missing and unreadable files
    others: tuple[str, ...] = ()  #: ids of other runs with files in the store
    beside: tuple[str, ...] = ()  #: other run directories next to this one
    owner: str = ""  #: id of the run that the store belongs to, where no run was named; else empty


def check_content(facts: StoreFacts) -> Check:
    """The checkpoints that a resume would find in storage."""
    name = "checkpoints"
    if facts.problem:
        return Check(name, "problem", facts.problem, "make storage readable: a resume would wait for it, and then fail")
    if facts.foreign:
        return Check(name, "problem", facts.foreign, "the run's own storage.url; see docs/storage.md#whose-a-store-is")
    if facts.wrong:
        more = f" (and {len(facts.wrong) - 1} more)" if len(facts.wrong) > 1 else ""
        return Check(name, "warning", f"{facts.wrong[0]}{more}", "memckpt verify RUN, and --repair for what is damaged")
    if facts.step is None:
        return Check(name, "ok", f"none in {facts.url}")
    whole = count(facts.checkpoints, "complete one") + (f" of the run {facts.owner!r}" if facts.owner else "")
    text = f"{whole}; a resume from storage takes step {facts.step}, if its content is right (memckpt verify)"
    return Check(name, "ok", text)


def check_other_runs(facts: StoreFacts) -> Check:
    """Other runs in the same store or beside the run directory."""
    if facts.others:
        said = f"{facts.url} also has files of {', '.join(facts.others)}, which are left alone"
        return Check("other runs", "warning", said, "a storage.url for each run")
    return Check("other runs", "ok", f"beside this one: {', '.join(facts.beside)}")


def check_room(nbytes: int, disk: DiskFacts | None, available: int | None) -> list[Check]:
    """Whether disk (None: an object store) and memory (None: an agent holds the model) suffice for a run's model."""
    checks = []
    if disk is not None:
        copies = StorageConfig().keep_last + 1
        text = f"{nbytes_text(disk.free)} free; a checkpoint of this run takes {nbytes_text(nbytes)}"
        if disk.free < nbytes:
            checks.append(Check("room of the run", "problem", text, "make room: the next checkpoint does not fit"))
        elif disk.free < copies * nbytes:
            remedy = f"make room for {copies} in all; or StorageConfig(keep_last=1)"
            checks.append(Check("room of the run", "warning", text, remedy))
        else:
            checks.append(Check("room of the run", "ok", text))
    if available is not None:
        modes: tuple[RedoMode, ...] = get_args(RedoMode)
        needed = {mode: int(nbytes / STATE_BYTES * bytes_per_parameter(mode)) for mode in modes}
        fits = [mode for mode in modes if needed[mode] <= available * 0.95]
        text = "this run takes about " + ", ".join(f"{nbytes_text(needed[mode])} ({mode})" for mode in modes)
        text += f", less with its ranks on several nodes; {nbytes_text(available)} are available"
        if fits:
            checks.append(Check("memory of the run", "ok", text))
        else:
            remedy = "more memory or nodes, fewer slots, or a longer anchor_period_steps"
            checks.append(Check("memory of the run", "warning", text, remedy))
    return checks


@dataclass(frozen=True)
class DiskFacts:
    """Result of writing and syncing a file in the nearest existing directory of where checkpoints would be."""

    directory: str
    filesystem: str
    free: int
    bytes_per_second: float | None  #: None: the write failed, or too few bytes are free to measure it
    problem: str = ""  #: error of the write; empty: none


def check_disk(facts: DiskFacts) -> list[Check]:
    """Whether a disk is writable, fast, large enough, and persistent."""
    where = f"{facts.directory} ({facts.filesystem})"
    checks = []
    if facts.problem:
        remedy = "another location: StorageConfig(url=...), or the permission to write there"
        checks.append(Check("storage", "problem", f"{where} cannot be written: {facts.problem}", remedy))
    else:
        if facts.bytes_per_second is None:
            text = f"{where}: can be written; no rate was measured, as only {nbytes_text(facts.free)} are free"
        else:
            text = f"{where}: {nbytes_text(facts.bytes_per_second)}/s, written and synced"
        if facts.filesystem in _LOST_WITH:
            text += f"; its files are lost with {_LOST_WITH[facts.filesystem]}"
            checks.append(Check("storage", "warning", text, "a persistent disk or volume: StorageConfig(url=...)"))
        elif facts.bytes_per_second is not None and facts.bytes_per_second < _SLOW_DISK:
            remedy = "a faster disk; until then checkpoints are written less often"
            checks.append(Check("storage", "warning", text, remedy))
        else:
            checks.append(Check("storage", "ok", text))
    # One more than keep_last: the oldest is deleted only after the newest has been verified.
    copies = 3
    fits = short_number(facts.free / STATE_BYTES / copies, 0)
    text = f"{nbytes_text(facts.free)} free; {copies} checkpoints of {fits} parameters (fp32, Adam) fit"
    if facts.free < _LITTLE_ROOM:
        checks.append(Check("room", "warning", text, "make room, or StorageConfig(keep_last=1)"))
    else:
        checks.append(Check("room", "ok", text))
    return checks


def check_store(url: str, seconds: float, problem: str) -> Check:
    """Result of writing, reading and deleting an object in `seconds`; `problem`: the error, empty: none."""
    remedy = "bucket, credentials, endpoint and bucket policy: objects must be listed, written, read and deleted"
    return _ok_without(problem, "storage", f"{url}: an object was written, read and deleted in {seconds:.1f} s", remedy)
