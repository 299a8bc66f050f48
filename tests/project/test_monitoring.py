"""The rules for Prometheus and the dashboard for Grafana in ``deploy/``: valid, tested, and of metrics that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families as parse

from memckpt.config import AgentConfig
from tests.support.cluster.processes import kill_and_wait
from tests.support.cluster.service_harness import ROOT
from tests.support.cluster.waiting import until
from tests.support.monitoring.shown_metrics import get, measured_of, text_of
from tests.support.monitoring.statuses import an_agent, some_peers
from tests.support.trainings.engine_cases import PLAIN
from tests.support.trainings.engine_child import Control, config, kill_self
from tests.support.trainings.engine_harness import Lab, collect

RULES = ROOT / "deploy/prometheus/memckpt.rules.yml"
SCRAPES = ROOT / "deploy/prometheus/prometheus.yml"
DASHBOARD = json.loads((ROOT / "deploy/grafana/memckpt.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
EXPRESSIONS += [each["expr"] for each in DASHBOARD["annotations"]["list"]]
PROMTOOL, PROMETHEUS = shutil.which("promtool"), shutil.which("prometheus")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool (Debian's package prometheus) is not installed")


def promtool(*arguments: str, stdin: str = "") -> None:
    """Run it beside the rules, and check that it is content."""
    assert PROMTOOL is not None
    command = [PROMTOOL, *arguments]
    ended = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, cwd=RULES.parent)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


@pytest.fixture(scope="module")
def exposition(tmp_path_factory: pytest.TempPathFactory) -> str:
    """All metrics that there are."""
    status = an_agent(peers=some_peers(), slots=4)
    assert status.storage is not None
    status = msgspec.structs.replace(status, storage=msgspec.structs.replace(status.storage, loses_at_most=3))
    return text_of(measured_of(tmp_path_factory.mktemp("run"), status, stored_at=1.0))


def names_in(exposition: str) -> set[str]:
    return {sample.name for family in parse(exposition) for sample in family.samples}


def used_by(expression: str) -> set[str]:
    return set(re.findall(r"\bmemckpt[_:][a-z_:]+", expression))


@needs_promtool
def test_prometheus_takes_the_rules_and_its_tests_of_them_pass() -> None:
    promtool("check", "rules", RULES.name)
    promtool("test", "rules", "memckpt.rules.test.yml")
    promtool("check", "config", SCRAPES.name)


@needs_promtool
def test_prometheus_takes_the_metrics_and_the_queries_of_the_dashboard(exposition: str, tmp_path: Path) -> None:
    promtool("check", "metrics", stdin=exposition)
    queries = tmp_path / "queries.yml"
    records = [{"record": f"q:{number}", "expr": expression} for number, expression in enumerate(EXPRESSIONS)]
    queries.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": records}]}))
    promtool("check", "rules", str(queries))


def test_rules_and_dashboard_use_metrics_that_exist(exposition: str) -> None:
    known = names_in(exposition) | {rule["record"] for rule in rules() if "record" in rule}
    used = set().union(*(used_by(rule["expr"]) for rule in rules()), *map(used_by, EXPRESSIONS))
    assert used - known == set()
    assert len(used) > 20
    variables = [each["definition"] for each in DASHBOARD["templating"]["list"] if "definition" in each]
    assert all(used_by(each) <= known for each in variables)


def test_every_alert_is_tested_and_says_what_to_do() -> None:
    tests = (RULES.parent / "memckpt.rules.test.yml").read_text()
    alerts = [rule for rule in rules() if "alert" in rule]
    assert [rule["alert"] for rule in alerts if rule["alert"] not in tests] == []
    assert all(set(rule["annotations"]) == {"summary", "description"} for rule in alerts)
    assert {rule["labels"]["severity"] for rule in alerts} == {"critical", "warning", "info"}


def test_panels_of_the_dashboard_have_ids_places_and_texts() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        own = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not own & cells, f"{panel['title']} lies on another one"
        assert max(x for x, _ in own) < 24
        cells |= own
    assert all(panel["title"] and panel["description"] and panel["targets"] for panel in PANELS)
    assert {target["datasource"]["uid"] for panel in PANELS for target in panel["targets"]} == {"${datasource}"}


# A real Prometheus


class Prometheus:
    """Answers queries at an address."""

    def __init__(self, address: str) -> None:
        self._address = address

    def values(self, query: str) -> dict[str, float]:
        """Values by the labels that tell samples apart here."""
        url = f"http://{self._address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        found = json.loads(get(url))["data"]["result"]
        return {one["metric"].get("alertname", one["metric"].get("node", "")): float(one["value"][1]) for one in found}


@contextmanager
def prometheus(directory: Path, run_dir: Path) -> Iterator[Prometheus]:
    """One with the shipped configuration, but for the run directory and shorter intervals."""
    assert PROMETHEUS is not None
    shutil.copy(RULES, directory)
    text = SCRAPES.read_text().replace("/data/runs/my-run", str(run_dir)).replace("15s", "1s")
    (directory / "prometheus.yml").write_text(text)
    log = directory / "log"
    command = [PROMETHEUS, "--config.file=prometheus.yml", "--web.listen-address=127.0.0.1:0", "--storage.tsdb.path=db"]
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=directory, stdout=output, stderr=output)
    try:
        until(lambda: "Server is ready" in log.read_text() or process.poll() is not None)
        address = re.search(r'msg="Listening on" address=(\S+)', log.read_text())
        assert address is not None, log.read_text()
        yield Prometheus(address[1])
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.slow
@pytest.mark.skipif(PROMETHEUS is None, reason="Debian's package prometheus is not installed")
def test_a_real_prometheus_finds_a_live_run_scrapes_it_and_sees_its_agent_die(lab: Lab) -> None:
    go_on = lab.directory / "go-on"

    def wait(control: Control) -> None:
        until(go_on.exists)

    settings = config("lazy", agent=AgentConfig(linger_seconds=60, metrics_port=0))
    (lab.directory / "prometheus").mkdir()
    with prometheus(lab.directory / "prometheus", lab.run_dir) as server:
        actions = {("after commit", 6): wait, ("backward", 9): kill_self}
        child, report = lab.begin(PLAIN, settings, actions=actions)
        until(lambda: server.values("memckpt_committed_step") == {"node": 6})
        assert server.values("memckpt_trainers") == {"node": 1}
        go_on.touch()
        assert collect(child, report).of("killed")
        until(lambda: server.values("memckpt_committed_step") == {"node": 8})
        until(lambda: server.values("memckpt_trainers") == {"node": 0})
        until(lambda: 0 < server.values("memckpt:committed_age_seconds")["node"] < 60)
        until(lambda: server.values("ALERTS") == {"MemckptTrainersGone": 1})
        assert server.values("up") == {"node": 1}
        kill_and_wait(lab.status().pid)
        until(lambda: server.values("up") == {"node": 0})
        until(lambda: "MemckptAgentDown" in server.values("ALERTS"))
