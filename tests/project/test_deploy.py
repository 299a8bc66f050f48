"""The files in ``deploy/``: valid for those who read them, consistent, and doing what they are there for.

How the systemd units behave is tested in ``test_service.py``.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from memckpt.config import StorageConfig
from memckpt.errors import AgentNotFoundError
from tests.support.cluster.service_harness import LIMIT_SECONDS, ROOT, Home, Unit
from tests.support.cluster.service_harness import SYSTEMD as UNITS
from tests.support.cluster.waiting import until
from tests.support.trainings.engine_harness import Lab

DEPLOY = ROOT / "deploy"
UNIT_FILES = sorted(path.name for path in UNITS.glob("*.service"))
MANIFESTS = sorted(path.name for path in (DEPLOY / "kubernetes").glob("*.yaml"))
BIN = Path(sys.executable).parent
GRACE_SECONDS = StorageConfig().grace_seconds
#: Settings of systemd 252 by section of a unit file, and long options of sbatch 22.05: those that are shipped.
SYSTEMD = {
    "Unit": {"After", "Description", "StartLimitBurst", "StartLimitIntervalSec", "Wants"},
    "Service": {
        *("Environment", "ExecStart", "KillMode", "LimitMEMLOCK", "Nice", "OOMPolicy", "Restart"),
        *("RestartPreventExitStatus", "RestartSec", "TimeoutStopSec", "Type", "WorkingDirectory"),
    },
    "Install": {"WantedBy"},
}
SBATCH = {
    *("cpus-per-task", "gpus-per-node", "job-name", "no-kill", "nodes", "ntasks-per-node", "open-mode", "output"),
    *("requeue", "signal", "time"),
}


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, **environment}
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=LIMIT_SECONDS)


# systemd


@pytest.mark.promise("the manifests in `deploy/` conform to their schemas")
@pytest.mark.parametrize("name", UNIT_FILES)
def test_every_setting_of_a_unit_is_one_that_its_section_has(name: str) -> None:
    unknown = {
        f"[{section}] {key}" for section, key, _ in Unit.read(UNITS / name).settings if key not in SYSTEMD[section]
    }
    assert not unknown


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_itself_takes_the_units(tmp_path: Path) -> None:
    (tmp_path / "runtime").mkdir(mode=0o700)
    home = Home.make(tmp_path / "home", tmp_path / "runtime")
    files = [str(shutil.copy(UNITS / name, tmp_path)) for name in UNIT_FILES]
    command = ["systemd-analyze", "verify", "--user", "--man=no", *files]
    checked = run(command, HOME=str(home.path), XDG_RUNTIME_DIR=str(home.runtime))
    # It also reads what else is installed on this machine.
    about_ours = [line for line in checked.stderr.splitlines() if "memckpt" in line or "train@" in line]
    assert (checked.returncode, about_ours) == (0, []), checked.stderr


def test_both_units_mean_the_same_run_and_the_same_agent() -> None:
    agent, train = (Unit.read(UNITS / name) for name in ("memckpt-agent@.service", "train@.service"))
    specifiers = {"h": "/home/me", "t": "/run/user/1000", "i": "my-run"}
    command, training = agent.command(specifiers), train.command(specifiers)
    assert command[1] == "agent"
    assert command[2] == training[training.index("--run-dir") + 1]
    for name in ("Wants", "After"):
        assert train.value(name) == "memckpt-agent@%i.service"


def test_an_agent_s_unit_gives_it_the_time_and_the_processes_to_save() -> None:
    agent = Unit.read(UNITS / "memckpt-agent@.service")
    assert agent.seconds("TimeoutStopSec") > GRACE_SECONDS + 5
    assert agent.value("KillMode") == "mixed", "its writer process must not be told, too"
    assert agent.value("Type") == "notify"


# Kubernetes


def resources(name: str) -> list[Any]:
    return [each for each in yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text()) if each is not None]


def job_of(name: str) -> Any:
    (job,) = [each for each in resources(name) if each["kind"] == "Job"]
    return job


def pod_of(name: str) -> Any:
    return job_of(name)["spec"]["template"]["spec"]


def containers_of(name: str) -> tuple[Any, Any]:
    """The agent's and the training's."""
    pod = pod_of(name)
    (agent,), (train,) = pod["initContainers"], pod["containers"]
    return agent, train


def environment_of(container: Any) -> dict[str, Any]:
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}


@pytest.mark.parametrize("version", ["1.29", kubernetes_validate.latest_version()])
@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_fits_the_schemas_of_kubernetes(name: str, version: str) -> None:
    """1.29 is the first version that has sidecars without being asked."""
    for resource in resources(name):
        kubernetes_validate.validate(resource, version, strict=True)


@pytest.mark.parametrize("name", MANIFESTS)
def test_trainer_and_agent_of_a_pod_find_each_other(name: str) -> None:
    pod, (agent, train) = pod_of(name), containers_of(name)
    assert pod["shareProcessNamespace"] is True
    assert agent["image"] == train["image"]
    assert agent["volumeMounts"] == train["volumeMounts"]
    variables = environment_of(agent), environment_of(train)
    assert variables[0]["MEMCKPT_NODE"] == variables[1]["MEMCKPT_NODE"]
    run_dir = agent["command"][2]
    assert Path(run_dir).parent in {Path(each["mountPath"]) for each in agent["volumeMounts"]}
    assert run_dir == train["command"][train["command"].index("--run-dir") + 1]
    assert "securityContext" not in agent, "one user id for all, the pod's"


@pytest.mark.parametrize("name", MANIFESTS)
def test_an_agent_outlives_the_trainer_and_has_the_time_to_save(name: str) -> None:
    pod, (agent, train) = pod_of(name), containers_of(name)
    assert pod["restartPolicy"] == "OnFailure"
    assert agent["restartPolicy"] == "Always"
    # torchrun gives its workers 30 s, and they end first.
    assert pod["terminationGracePeriodSeconds"] >= 30 + GRACE_SECONDS + 5
    assert not {"livenessProbe", "livenessprobe"} & {*agent, *train}
    assert agent["startupProbe"]["timeoutSeconds"] > 10, "so long `memckpt status` waits for an answer"


def test_an_indexed_job_is_of_one_mind_about_its_nodes() -> None:
    name = "indexed-job.yaml"
    service = next(each for each in resources(name) if each["kind"] == "Service")
    job, (agent, train) = job_of(name), containers_of(name)
    spec, job_name = job["spec"], job["metadata"]["name"]
    assert spec["completionMode"] == "Indexed"
    assert f"--nnodes={spec['completions']}" in train["command"]
    assert spec["parallelism"] == spec["completions"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job_name}
    domain, port = spec["template"]["spec"]["subdomain"], service["spec"]["ports"][0]["port"]
    assert domain == service["metadata"]["name"]
    assert f"--rdzv-endpoint={job_name}-0.{domain}:{port}" in train["command"]
    node = environment_of(agent)["MEMCKPT_NODE"]["fieldRef"]["fieldPath"]
    assert node == "metadata.labels['batch.kubernetes.io/job-completion-index']"


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_sidecar_has_started_when_its_probe_says_so(lab: Lab, name: str) -> None:
    container, _ = containers_of(name)
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    places = {mounts["runs"]: lab.directory / "runs"}

    def here(text: str) -> str:
        for inside, outside in places.items():
            text = re.sub(rf"^{inside}(?=/)", str(outside), text)
        return text

    environment = {"PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    for variable, value in environment_of(container).items():
        environment[variable] = here(value) if isinstance(value, str) else "my-run-0"
    probe = [here(word) for word in container["startupProbe"]["exec"]["command"]]
    assert run(probe, **environment).returncode == AgentNotFoundError.exit_code
    with (lab.directory / "agent.log").open("wb") as log:
        agent = subprocess.Popen([here(word) for word in container["command"]], env=environment, stdout=log, stderr=log)
    try:
        until(lambda: run(probe, **environment).returncode == 0)
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(LIMIT_SECONDS) == 0
    finally:
        agent.kill()
        agent.wait()
    assert run(probe, **environment).returncode == AgentNotFoundError.exit_code


# Scripts

SBATCH_FILES = sorted((DEPLOY / "slurm").glob("*.sbatch"))
SCRIPTS = [*SBATCH_FILES, *DEPLOY.rglob("*.sh")]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_one_that_bash_and_shellcheck_take(script: Path) -> None:
    for command in (["bash", "-n"], [str(BIN / "shellcheck"), "--norc"]):
        checked = run([*command, str(script)])
        assert checked.returncode == 0, checked.stdout + checked.stderr


# Slurm


@pytest.mark.parametrize("script", SBATCH_FILES, ids=lambda path: path.name)
def test_every_option_of_a_script_is_one_that_sbatch_has(script: Path) -> None:
    lines = script.read_text().splitlines()
    asked = [shlex.split(line.lstrip("#").removeprefix("SBATCH")) for line in lines if re.match("##?SBATCH", line)]
    options = [word.partition("=")[0].removeprefix("--") for words in asked for word in words]
    assert len(options) == len(asked), "one option a line"
    assert set(options) <= SBATCH
    # sbatch reads no further than the first command.
    first = next(index for index, line in enumerate(lines) if line and not line.startswith("#"))
    assert not [line for line in lines[first:] if "#SBATCH" in line]


@pytest.mark.parametrize("script", SBATCH_FILES, ids=lambda path: path.name)
def test_a_script_is_warned_in_time_to_save(script: Path) -> None:
    (warning,) = re.findall(r"^#SBATCH --signal=B:USR1@(\d+)$", script.read_text(), re.MULTILINE)
    assert int(warning) >= 30 + GRACE_SECONDS + 5
    assert re.search(r"^trap '.*' USR1\b", script.read_text(), re.MULTILINE)
