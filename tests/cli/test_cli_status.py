"""``memckpt status``: with an agent, without one, and with storage that cannot be read."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from memckpt.cli import run_view
from memckpt.cli import status as status_module
from memckpt.cli.run_view import Looker, Stored, View, problems_of
from memckpt.cli.status import render
from memckpt.config import StorageConfig
from memckpt.errors import AgentGoneError, AgentNotFoundError, ConfigurationError
from memckpt.journal.events import AgentLeft, AttemptBegan, Finished
from memckpt.journal.journal import Journal
from memckpt.processes.address import AgentAddress
from memckpt.protocol.status import AuditStatus, PeerLinkStatus, StorageStatus
from memckpt.storage.local_store import LocalStore
from tests.support.monitoring.statuses import a_view, an_agent, an_alarm, some_peers
from tests.support.storage.stored_parts import part_of, write
from tests.support.storage.stored_runs import BEFORE_5, until_stored
from tests.support.trainings.cli_harness import exit_status, invoke, invoke_json
from tests.support.trainings.engine_cases import PLAIN
from tests.support.trainings.engine_child import config, kill_self
from tests.support.trainings.engine_harness import Lab


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that no agent serves, with the checkpoints of steps 1 and 2."""
    for record in (1, 2):
        write(LocalStore(tmp_path / "run" / "storage"), part_of(record))
    return tmp_path / "run"


def text_of(view: View) -> str:
    console = Console(width=150)
    with console.capture() as captured:
        console.print(render(view))
    return captured.get()


# What is shown


def test_a_view_names_everything_that_is_known() -> None:
    text = text_of(a_view(an_agent(), Stored("/runs/one/storage", 2, 8, 0.0, 5 << 30, 1)))
    for expected in (
        "step 10, 0.2 s ago",
        "3 records, 3.0 MiB, generation 2",
        "eager, 12.3 ms a record, 3 records behind, drift 1 ulp",
        "pid 43, committed record 10",
        "pid 4711, up 2 h",
        "step 8, 2 steps behind memory",
        "2 checkpoints, the newest 5.0 GiB",
        "1 commit file; see memckpt verify",
        "every 60 s or more; one is being written now",
        "476.8 MiB/s",
        "the last one failed: no space left",
    ):
        assert expected in text


def test_how_often_state_is_captured_and_why() -> None:
    proved = an_agent(check="step 9 was repeated: 2 parameters are equal, bit for bit")
    assert re.search(r"check +│ step 9 was repeated: 2 parameters are equal", text_of(a_view(proved)))
    captured = an_agent(mode="snapshot", every=10, mode_reason="LBFGS [evaluates]", applied=None)
    assert "snapshot of every 10th step (LBFGS [evaluates])" in text_of(a_view(captured))


@pytest.mark.parametrize(
    ("audit", "said"),
    [
        (AuditStatus(16, 9, 0, 0.5), "16 pieces redone, the last one up to record 9, no finding, 0.5 CPU s"),
        (AuditStatus(1, 9, 1, 0.5), "1 finding"),
        (AuditStatus(0, None, 0, 3.0, problem="no class"), "0 pieces redone, no finding, 3.0 CPU s; not all: no class"),
    ],
)
def test_what_the_audit_has_done(audit: AuditStatus, said: str) -> None:
    assert said in " ".join(text_of(a_view(an_agent(audit=audit))).split())


def test_what_is_not_known_is_left_out() -> None:
    lazy = an_agent(mode="lazy", applied=None, redo_seconds_per_record=None, trainers=(), storage=None)
    text = text_of(a_view(lazy))
    assert "drift" not in text
    assert "trainers" in text
    assert "this run writes no checkpoints to storage" in text
    assert a_view(lazy).lag_records is None
    assert "nothing is held yet" in text_of(a_view(an_agent(step=None, committed=(), mode="")))
    assert "no agent answers" in text_of(a_view(None))
    every = StorageStatus("s3://bucket/[run]", None, None, 100, None, False, "")
    text = text_of(a_view(an_agent(storage=every), Stored("s3://bucket/[run]")))
    assert "every 100 steps" in text
    assert "no checkpoint yet" in text
    assert "s3://bucket/[run]" in text


def test_states_that_are_sent_in_place_of_records() -> None:
    text = text_of(a_view(an_agent(peers=some_peers(every=12))))
    assert re.search(r"sends +│ the whole state every 12 steps", text)
    assert "do not carry" not in text
    for every, what in ((1, "every record"), (2, "the whole state every 2 steps")):
        text = text_of(a_view(an_agent(peers=some_peers(every=every, needed=30))))
        assert f"{what}; the links do not carry that: peers.every_steps=30 would do" in text
    assert "sends" not in text_of(a_view(an_agent(peers=some_peers())))


@pytest.mark.parametrize(
    ("mode", "protected", "said"),
    [
        ("replica", None, "this machine is lost; fewer with a shorter interval (storage.every_steps), or storage.mode"),
        ("replica", False, "this machine is lost"),
        ("log", True, "all nodes are lost at once; fewer with smaller batches (storage.batch_steps)"),
    ],
)
def test_what_is_at_risk_is_said_with_its_remedy(mode: str, protected: bool | None, said: str) -> None:
    peers = None if protected is None else some_peers(protected=protected)
    tier = StorageStatus("/s", 8, 60.0, None, None, False, "", mode=mode, loses_at_most=268)
    agent, later = an_agent(storage=tier, peers=peers), "before the next write at most 268 steps may be"
    assert agent.step is not None
    for behind, now in ((3, "3 steps are in memory only, "), (1, "1 step is in memory only, ")):
        text = " ".join(text_of(a_view(agent, Stored("/s", 1, agent.step - behind, 1.0))).replace("│", " ").split())
        assert f"{now}{later}, if training lasts so long; lost if {said}" in text
    late = " ".join(text_of(a_view(agent, Stored("/s", 1, agent.step - 300, 1.0))).replace("│", " ").split())
    assert "300 steps are in memory only; lost if" in late


def test_peers_that_protect() -> None:
    text = text_of(a_view(an_agent(peers=some_peers())))
    for expected in (
        "protected, record 9 on every node",
        "erasure code, k=2, m=1; encrypted and authenticated (curve); ack wait",
        "record 10 of ranks 0-1, 4-5; record 9 of ranks 2-3",
        "5.0 MiB of other nodes; b ranks 2-3 to record 10; c rank 4 to record 9",
        "connected, 3.0 MiB behind, silent for 9.0 s",
        "7.0 MiB sent, 1.0 MiB a record, at most 119.2 MiB/s, as fast as the link takes it",
    ):
        assert expected in text
    for absent in ("not protected", "refused", "gap", "recovering", "not connected"):
        assert absent not in text
    assert "peers" not in text_of(a_view(an_agent()))


def test_peers_that_do_not_protect() -> None:
    cut = PeerLinkStatus("c", False, 1 << 20, None, "[Errno 113] no route")
    lying = PeerLinkStatus("d", True, 0, 0.1, "its fragments are damaged")
    peers = some_peers(
        scheme="2 copies",
        security="plain",
        ack="proceed",
        watermark=None,
        acknowledged=(),
        protected=False,
        problem="node c [rack 2] is not there",
        links=(PeerLinkStatus("b", False, 0, 200.0), cut, lying),
        bytes_per_record=None,
        rate_limit_bytes_per_second=None,
        pace="",
        refused=1,
        gap=(4, 7),
        recovering="ranks 2-3 from b, 40%",
    )
    text = text_of(a_view(an_agent(peers=peers)))
    for expected in (
        "not protected: node c [rack 2] is not there; nothing is acknowledged yet",
        "2 copies; neither encrypted nor authenticated (plain); ack proceed",
        "not connected, silent for 3 min",
        "not connected, never heard, 1.0 MiB behind: [Errno 113] no route",
        "connected, silent for 0.1 s: its fragments are damaged",
        "1 message of strangers or former processes, damaged, or beyond a limit",
        "records 4 to 7 were in no peer's memory",
        "ranks 2-3 from b, 40%",
    ):
        assert expected in text
    assert "record 4 was in no peer's memory" in text_of(a_view(an_agent(peers=some_peers(gap=(4, 4)))))


def test_many_peers_that_are_well_take_one_row() -> None:
    links = tuple(PeerLinkStatus(f"n{number}", number != 3, number << 20, 0.1) for number in range(20))
    text = text_of(a_view(an_agent(peers=some_peers(links=links))))
    assert "peer n3 " in text
    assert "peer n4 " not in text
    assert "19 connected, at most 19.0 MiB behind" in text
    assert "all others" in text
    text = text_of(a_view(an_agent(peers=some_peers(links=links[4:]))))
    assert "all peers" in text


# Without an agent


def test_nothing_anywhere_has_an_exit_status_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("status", "stop"):
        with pytest.raises(AgentNotFoundError, match="there is no such directory"):
            invoke(command, tmp_path / "nothing")
    (tmp_path / "agent-other.log").touch()
    with pytest.raises(AgentNotFoundError, match="had agents on other: ask there, or name one with --node"):
        invoke("status", tmp_path, "--node", "node")
    assert exit_status(monkeypatch, "status", tmp_path, "--json") == 11
    said = json.loads(capsys.readouterr().out)
    assert said["error"] == "AgentNotFoundError"
    assert said["exit_status"] == 11


def test_storage_is_shown_where_no_agent_answers(run: Path) -> None:
    code, found = invoke_json("status", run)
    assert code == 0
    assert found["agent"] is None
    assert found["stored"]["step"] == 2
    assert found["stored"]["checkpoints"] == 2
    assert "step 2" in invoke("status", run)[1]
    elsewhere = run.parent / "elsewhere"
    assert invoke_json("status", elsewhere, "--url", run / "storage")[1]["stored"]["step"] == 2


def test_a_run_that_has_finished_says_so(run: Path) -> None:
    """Until an attempt begins, whatever its agents note behind the end."""
    journal = Journal(run, AgentAddress.of(run, None).node)
    began = AttemptBegan(1, ((0, 1),))
    for events, finished in (
        ([began, Finished(7), AgentLeft("finished")], True),
        ([began, AgentLeft("told to")], False),
    ):
        for event in events:
            journal.add(event)
        assert journal.settle(10.0)
        assert invoke_json("status", run)[1]["finished"] == finished
        with pytest.raises(AgentNotFoundError) as none:
            invoke("status", run, "--memory")
        assert ("training has finished at step 7, " in str(none.value)) == finished
    journal.close()


def test_a_probe_asks_the_agent_alone(run: Path, lab: Lab) -> None:
    """Checkpoints of an earlier attempt do not make an agent that is not there yet ready."""
    with pytest.raises(AgentNotFoundError, match="no agent answers") as none:
        invoke("status", run, "--memory")
    assert "checkpoints" not in str(none.value)
    (run / "training-2").mkdir()
    with pytest.raises(AgentNotFoundError, match=f"a later training of its script is in {run / 'training-2'}"):
        invoke("status", run, "--memory")
    with pytest.raises(ConfigurationError, match="expected no --url with --memory"):
        invoke("status", run, "--memory", "--url", run / "storage")
    lab.start_agent(run)
    code, found = invoke_json("status", run, "--memory")
    assert code == 0
    assert found["stored"] is None
    assert found["steps_behind"] is None
    assert found["agent"]["by_operator"] is False
    text = invoke("status", run, "--memory")[1]
    assert "nothing is held yet" in text
    assert "storage" not in text.replace("this run writes no checkpoints to storage", "")
    lab.stop(run)


def test_storage_that_cannot_be_opened_is_an_error_without_an_agent_and_a_line_with_one(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match="quux"):
        invoke("status", run, "--url", "quux://x")
    monkeypatch.setattr(run_view, "ask_status", lambda address: an_agent())
    code, found = invoke_json("status", run, "--url", "quux://x")
    assert code == 0
    assert found["agent"]["step"] == 10
    assert "quux" in found["stored"]["problem"]
    assert "quux" in invoke("status", run, "--url", "quux://x")[1]


def test_an_agent_that_does_not_answer_in_time_is_told_from_none(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(address: AgentAddress) -> None:
        raise AgentGoneError("no answer within 10 s")

    monkeypatch.setattr(run_view, "ask_status", hang)
    code, found = invoke_json("status", run)
    assert code == AgentGoneError.exit_code
    assert found["agent_problem"] == "no answer within 10 s"
    assert found["stored"]["step"] == 2


def test_an_object_store_is_listed_again_only_when_the_agent_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"memory://{tmp_path.name}"
    listed = []
    read = run_view.read_catalog
    monkeypatch.setattr(run_view, "read_catalog", lambda store: listed.append(store.url) or read(store))
    stored_steps = iter([1, 1, 2])
    monkeypatch.setattr(
        run_view,
        "ask_status",
        lambda address: an_agent(storage=StorageStatus(url, next(stored_steps), 60.0, None, None, False, "")),
    )
    looker = Looker(AgentAddress.of(tmp_path, "node"), None)
    for _ in range(3):
        looker.view_run()
    assert len(listed) == 2


# Watching


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[View]:
    """What each watch has seen; Ctrl-C ends it in its third look."""
    look, looks = Looker.view_run, []

    def until_interrupted(self: Looker) -> View:
        if len(looks) == 2:
            raise KeyboardInterrupt
        looks.append(look(self))
        return looks[-1]

    monkeypatch.setattr(Looker, "view_run", until_interrupted)
    return looks


def test_a_watch_looks_again_and_again(run: Path, looks: list[View]) -> None:
    code, text = invoke("status", run, "--watch", "--interval", "0.1", "--json")
    assert code == 0
    assert [json.loads(line)["stored"]["step"] for line in text.splitlines()] == [2, 2]
    looks.clear()
    code, text = invoke("status", run.parent / "nothing", "--watch", "--interval", "0.1")
    assert code == 0
    assert text.count("there is no such directory") == 2


def test_a_watch_on_a_terminal_changes_in_place_and_ends_with_ctrl_c(
    run: Path, looks: list[View], monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Console(force_terminal=True, width=100, record=True)
    monkeypatch.setattr(status_module, "out", console)
    assert invoke("status", run, "--watch", "--interval", "0.1")[0] == 0
    assert len(looks) == 2
    assert "step 2" in console.export_text()


# With an agent


@pytest.mark.parametrize("redo", ["lazy", "eager"])
def test_status_with_an_agent(lab: Lab, redo: str) -> None:
    settings = config(redo, storage=StorageConfig(every_steps=5, min_seconds=3600))
    actions = {**BEFORE_5, ("after commit", 7): until_stored(5), ("backward", 8): kill_self}
    lab.train(PLAIN, settings, actions=actions)
    code, found = invoke_json("status", lab.run_dir)
    agent = found["agent"]
    assert code == 0
    assert agent["step"] == 7
    assert agent["mode"] == redo
    assert agent["records_held"] >= 2
    assert agent["seconds_since_commit"] > 0
    assert agent["uptime_seconds"] > agent["seconds_since_commit"]
    assert found["stored"]["step"] in (5, 7)
    assert found["steps_behind"] == 7 - found["stored"]["step"]
    assert (found["lag_records"] is None) == (redo == "lazy")
    text = invoke("status", lab.run_dir)[1]
    assert "step 7" in text
    assert redo in text
    lab.stop()
    assert invoke_json("status", lab.run_dir)[1]["agent"] is None


# Whether all is well


@pytest.mark.parametrize(
    ("agent", "stored", "said"),
    [
        ({}, {}, []),
        ({"trainers": ()}, {}, ["no trainer is connected"]),
        ({"step": None}, {}, ["nothing is held yet"]),
        ({"storage": an_alarm("disk full")}, {}, ["the last checkpoint could not be written: disk full"]),
        ({"storage": an_alarm("", "denied")}, {}, ["old files in storage could not be deleted: denied"]),
        ({"peers": True}, {}, ["other nodes do not protect this run: b is silent"]),
        ({"check": "step 4 was repeated: DIFFERENT: x"}, {}, ["the last resume was not exact: step 4 was repeated: "]),
        ({}, {"problem": "not mounted"}, ["storage cannot be read: not mounted"]),
        ({}, {"damaged": 2, "unreadable": 1}, ["2 files in storage are damaged", "1 file in storage is not readable"]),
        ({}, {"missing": 1}, ["the data of 1 commit file in storage are missing"]),
        ({}, {"step": 6}, ["storage has step 6, 4 steps behind step 10 in memory: more than 3"]),
        ({}, {"step": None}, ["storage has nothing, 10 steps behind step 10"]),
    ],
)
def test_what_is_wrong_is_said(agent: dict[str, Any], stored: dict[str, Any], said: list[str]) -> None:
    if "peers" in agent:
        agent = {"peers": some_peers(protected=False, problem="b is silent")}
    status = an_agent(**{"storage": an_alarm(""), **agent})
    found = list(problems_of(status, Stored("/runs", **{"step": 8, **stored}), 3))
    assert len(found) == len(said)
    assert all(line.startswith(begin) for line, begin in zip(found, said, strict=True)), found


def test_peers_that_acknowledge_nothing_new_are_noticed() -> None:
    """While states replace records (`every`), the last state counts as protected however old it is."""

    def found(max_behind: int | None, watermark: int | None, **fields: Any) -> list[str]:
        agent = an_agent(storage=None, peers=some_peers(watermark=watermark, every=4), **fields)
        return list(problems_of(agent, None, max_behind))

    assert found(3, 7) == found(None, 1) == []
    assert found(3, 6) == ["other nodes have record 6, 4 records behind record 10 in memory: more than 3"]
    assert found(3, None) == ["other nodes have nothing, 10 records behind record 10 in memory: more than 3"]
    assert found(3, None, committed=()) == []


def test_records_that_do_not_come_are_noticed() -> None:
    def found(max_age: float | None, **fields: Any) -> list[str]:
        return list(problems_of(an_agent(**{"storage": an_alarm(""), **fields}), None, None, max_age))

    assert found(60.0) == []
    assert found(60.0, seconds_since_commit=61.0) == ["nothing has been committed for 61 s: more than 60 s"]
    assert found(None, seconds_since_commit=1e6) == []
    # A state that came from peers or storage: no commit since the agent started.
    assert found(60.0, seconds_since_commit=None) == ["nothing has been committed for 2 h: more than 60 s"]
    assert found(60.0, seconds_since_commit=None, uptime_seconds=5.0) == []


def test_a_check_has_an_exit_status(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert exit_status(monkeypatch, "status", run, "--check") == 11
    monkeypatch.setattr(run_view, "ask_status", lambda address: an_agent(storage=None))
    assert invoke("status", run, "--check") == (
        0,
        "well: step 10 in memory, the last commit 0.2 s ago, storage 8 steps behind\n",
    )
    assert invoke("status", run, "--check", "--max-behind", 8)[0] == 0
    code, found = invoke_json("status", run, "--check", "--max-behind", 7)
    assert code == 1
    assert found["well"] is False
    assert found["problems"] == ["storage has step 2, 8 steps behind step 10 in memory: more than 7"]
    memory = ("status", run, "--check", "--memory")
    assert invoke(*memory) == (0, "well: step 10 in memory, the last commit 0.2 s ago\n")
    assert invoke(*memory, "--max-age", "1")[0] == 0
    assert invoke(*memory, "--max-age", "0.1") == (1, "nothing has been committed for 0.2 s: more than 0.1 s\n")
    for wrong in (
        ["--max-behind", 1],
        ["--max-age", 1],
        ["--check", "--max-behind", 1, "--memory"],
        ["--check", "--watch"],
    ):
        with pytest.raises(ConfigurationError, match="expected"):
            invoke("status", run, *wrong)


# Start


def test_looking_does_not_import_torch(run: Path) -> None:
    """Torch takes seconds, and one command a day is too many of them."""
    script = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from memckpt.cli.main import app\n"
        f"run = {str(run)!r}\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        # No agent answers: `stop` and `status --check` raise.
        "for command in ('ls', 'verify', 'status', 'pin 1', 'gc', 'rm 2', 'stop!', 'status! --check'):\n"
        "    name, *rest = command.split()\n"
        "    code = CliRunner().invoke(app, [name.rstrip('!'), run, *rest]).exit_code\n"
        "    assert code == ('!' in name), command\n"
        "assert not {'torch', 'numpy', 'fsspec'} & set(sys.modules), sorted(sys.modules)\n"
    )
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_package_is_the_command() -> None:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "memckpt", "status", "--check", "nowhere"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 11, done.stderr
    assert "memckpt: no agent answers for" in done.stderr


def test_an_agent_is_not_started_where_no_directory_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="run_dir: expected a directory, or a path at which one can be made"):
        invoke("agent", tmp_path / "file" / "run")
