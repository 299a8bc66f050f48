"""The demo ends well when the two runs are the same, and only then."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from examples.demo.__main__ import main
from examples.demo.verdict import compare_losses, compare_states, same_bits

TINY = ["--size", "tiny", "--seed", "3"]


def test_demo_resumes_bit_for_bit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([*TINY, "--steps", "16", "--kills", "1", "--svg", str(tmp_path / "demo.svg")]) == 0
    said = capsys.readouterr().out
    assert said.count("SIGKILL in step") == 1
    assert "Equal, bit for bit" in said, said
    kills = re.findall(r"^ +\d  +\d+, (\w+) +\d+ +\d+ +(\d+) +(\S+) +[\d.]+ (\w+) ", said, re.MULTILINE)
    assert [kill[2:] for kill in kills] == [("equal", "cold")], said
    # Between the optimizer and the commit a step is lost; which of the two a kill in "commit" meets is chance.
    assert all(int(lost) <= (phase == "commit") for phase, lost, *_ in kills), said
    picture = (tmp_path / "demo.svg").read_text()
    appears = {
        text.replace("&#160;", " "): float(seconds)
        for seconds, text in re.findall(r'animation-delay:([\d.]+)s">([^<]*)<', picture)
    }
    assert appears["SIGKILL"] < appears["Equal, bit for bit:"]
    assert "http" not in picture.replace("http://www.w3.org/2000/svg", "").replace("https://www.textualize.io", "")


@pytest.mark.slow
def test_demo_begins_warm_from_its_second_restart_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--steps", "24", "--kills", "3"]) == 0
    said = capsys.readouterr().out
    assert re.findall(r" equal +[\d.]+ (\w+) ", said) == ["cold", "warm", "warm"], said
    assert "Equal, bit for bit" in said, said


@pytest.mark.promise("the demo's verdict notices one changed weight")
@pytest.mark.slow
def test_demo_sees_one_changed_weight(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--steps", "16", "--kills", "1", "--sabotage"]) == 1
    said = capsys.readouterr().out
    assert said.count("SIGKILL in step") == 1
    assert "Different" in said, said


@pytest.mark.slow
def test_a_child_that_fails_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--size", "no such size", "--steps", "24", "--kills", "1"]) == 1
    assert "invalid choice: 'no such size'" in capsys.readouterr().out.replace("\n", " ")


def test_states_that_differ_in_one_bit_differ(tmp_path: Path) -> None:
    one = {"parameters": {"weight": torch.ones(4), "bias": torch.zeros(2)}}
    other = {"parameters": {"weight": torch.nextafter(torch.ones(4), torch.full((4,), 2.0)), "bias": torch.zeros(2)}}
    torch.save(one, tmp_path / "one.pt")
    torch.save(other, tmp_path / "other.pt")
    (found,) = compare_states(tmp_path / "one.pt", tmp_path / "other.pt")
    assert found.differing == ("weight",)
    assert compare_states(tmp_path / "one.pt", tmp_path / "one.pt")[0].equal


def test_a_state_that_one_run_lacks_differs(tmp_path: Path) -> None:
    torch.save({"parameters": {"weight": torch.ones(4)}}, tmp_path / "one.pt")
    torch.save({"parameters": {}}, tmp_path / "other.pt")
    assert compare_states(tmp_path / "one.pt", tmp_path / "other.pt")[0].differing == ("weight",)


def test_bits_are_compared_and_not_values() -> None:
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))


def test_losses_of_all_steps_count() -> None:
    assert compare_losses({1: "0x1p0", 2: "0x1p1"}, {1: "0x1p0"}).differing == ("step 2",)
