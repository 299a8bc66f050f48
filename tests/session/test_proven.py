"""What ``resume_check="auto"`` stands for in an attempt, by what earlier attempts have noted."""

from __future__ import annotations

from pathlib import Path

from memckpt.config import MemckptConfig
from memckpt.session.ranks import Ranks
from memckpt.session.resume.first_steps import PROVEN_AGAIN, PROVEN_FILE, ProvenEnvironments


def begin(run_dir: Path, **settings: int) -> ProvenEnvironments:
    return ProvenEnvironments(MemckptConfig(resume_check="auto", **settings), run_dir, Ranks())  # type: ignore[arg-type]


def test_steps_are_repeated_until_one_was_equal_and_each_tenth_time_again(tmp_path: Path) -> None:
    assert [begin(tmp_path).config.resume_check for _ in range(3)] == ["replay"] * 3
    begin(tmp_path).note_equal()
    others = ["witness"] * (PROVEN_AGAIN - 1)
    for _ in range(2):
        assert [begin(tmp_path).config.resume_check for _ in others] == others
        # As long as no repeated step was equal: it may not have been possible to repeat one.
        assert [begin(tmp_path).config.resume_check for _ in range(2)] == ["replay"] * 2
        begin(tmp_path).note_equal()


def test_other_settings_are_another_environment(tmp_path: Path) -> None:
    begin(tmp_path).note_equal()
    assert begin(tmp_path, slots=5).config.resume_check == "replay"
    assert begin(tmp_path).config.resume_check == "witness"


def test_a_repetition_that_is_put_off_comes_back(tmp_path: Path) -> None:
    begin(tmp_path).put_off()
    assert [begin(tmp_path).config.resume_check for _ in range(2)] == ["witness", "replay"]


def test_a_damaged_note_proves_nothing(tmp_path: Path) -> None:
    begin(tmp_path).note_equal()
    (tmp_path / PROVEN_FILE).write_bytes(b"\xff 1\nabc\n")
    assert begin(tmp_path).config.resume_check == "replay"
    begin(tmp_path).note_equal()
    assert begin(tmp_path).config.resume_check == "witness"
