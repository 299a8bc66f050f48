"""``memckpt doctor``: checks of the environment, with remedies."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from memckpt.cli.alarms import alarms_of
from memckpt.cli.common import AsJson, Url, count, directory_only, out, place_of, print_json
from memckpt.errors import ConfigurationError
from memckpt.memory.budget import available_bytes, cpu_quota, memory_limits
from memckpt.storage.local_store import LocalStore
from memckpt.storage.urls import open_store

if TYPE_CHECKING:  # imported only when doctor runs, so that other commands start fast
    from memckpt.protocol.status import Status
    from memckpt_tools.doctor.checks import Check

OptionalRun = Annotated[
    Path | None,
    typer.Argument(help="A run directory. Default: the current directory, as storage.", callback=directory_only),
]
#: More bytes than a disk's own cache hides.
_TRIAL_BYTES = 64 << 20
_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def examine(run: Path | None, url: str | None) -> Iterator[Check]:
    """Run all checks, the quick ones first."""
    from memckpt_tools.doctor import checks
    from memckpt_tools.doctor import probes as facts

    yield checks.check_python(sys.version_info[:3])
    yield checks.check_kernel(platform.release(), facts.missing_kernel_features())
    agent = None
    if run is not None:
        agent, problem = facts.ask_agent(run)
        yield checks.check_agent(agent.pid if agent is not None else None, problem)
        if agent is not None:
            yield checks.check_alarms(tuple(alarms_of(agent)))
            yield checks.check_advice(agent.advice, agent.advice_reason)
    yield checks.check_sockets(facts.try_sockets())
    yield checks.check_memory(available_bytes(), min((one.limit for one in memory_limits()), default=None))
    job, service = os.environ.get("SLURM_JOB_ID"), facts.own_service()
    yield checks.check_survival(job, service, facts.in_container())
    yield from _examine_software()
    peers, problem = facts.configured_peers()
    yield checks.check_descriptors(*facts.descriptor_limits(), facts.job_nodes(agent), peers)
    yield checks.check_settings(problem)
    yield checks.check_erasure(*facts.erasure_facts(), peers)
    yield checks.check_transport(*facts.transport_facts(), peers)
    if run is None:
        yield from _examine_storage(url or str(Path.cwd()), None, agent)
    elif url is not None or not problem:  # else the location of checkpoints is unknown
        yield from _examine_storage(url or place_of(run, None), run, agent)


def _examine_software() -> Iterator[Check]:
    from memckpt_tools.doctor import checks
    from memckpt_tools.doctor import probes as facts

    import_error, threads, cuda = facts.torch_facts()
    torch = checks.check_torch(facts.installed_version("torch"), import_error)
    yield torch
    if torch.outcome == "ok":
        yield checks.check_cores(len(os.sched_getaffinity(0)), cpu_quota(), threads, cuda)
        yield checks.check_locked_memory(facts.locked_memory_limit(), cuda)
    yield checks.check_lightning(facts.installed_version("lightning"), facts.installed_version("pytorch-lightning"))
    for name, purpose in {
        "accelerate": "training with Accelerate",
        "safetensors": "memckpt export --format safetensors",
        "s3fs": "storage at s3://",
    }.items():
        yield checks.check_optional(name, facts.installed_version(name), purpose)


def _examine_storage(url: str, run: Path | None, agent: Status | None) -> Iterator[Check]:
    from memckpt_tools.doctor import checks
    from memckpt_tools.doctor import probes as facts

    driver = checks.check_driver(url, {name: facts.installed_version(name) for name in ("s3fs", "gcsfs", "adlfs")})
    if driver is not None and driver.outcome == "problem":
        yield driver
        return
    try:
        store = open_store(url)
    except ConfigurationError as error:
        yield checks.check_place(str(error))
        return
    if isinstance(store, LocalStore):
        disk = facts.try_disk(store, _TRIAL_BYTES)
        yield from checks.check_disk(disk)
    else:
        disk = None
        seconds, problem = facts.try_store(store)
        yield checks.check_store(store.url, seconds, problem)
        if run is None and problem:
            return
    if run is None and disk is not None:
        return
    found = facts.look_into_store(store, run)
    yield checks.check_content(found)
    if found.others or found.beside:
        yield checks.check_other_runs(found)
    if found.nbytes:
        yield from checks.check_room(found.nbytes, disk, None if agent is not None else available_bytes())


def doctor(run: OptionalRun = None, url: Url = None, as_json: AsJson = False) -> None:
    """Check what will not work in this environment, with remedies.

    Writes and removes 64 MiB, but at most a quarter of the free bytes, where checkpoints would be (1 KiB in an object
    store). Exit status 1 if there is a problem; warnings are no problems.
    """
    found = []
    for check in examine(run, url):
        found.append(check)
        if not as_json:
            _show(check)
    problems, warnings = ([one for one in found if one.outcome == kind] for kind in ("problem", "warning"))
    if as_json:
        print_json({"checks": found, "problems": len(problems), "warnings": len(warnings)})
    else:
        out.print(f"{count(len(problems), 'problem')}, {count(len(warnings), 'warning')}")
    if problems:
        raise typer.Exit(1)


def _show(check: Check) -> None:
    style = _STYLES[check.outcome]
    out.print(f"[{style}]{check.outcome:<7}[/]  {check.name:<17}  {escape(check.text)}", soft_wrap=True)
    if check.remedy:
        out.print(f"{'':28}{escape(check.remedy)}", style=style, soft_wrap=True)
