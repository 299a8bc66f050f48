"""Kills of a training, drawn from a seed."""

from __future__ import annotations

from tests.support.trainings.engine_training import Case


def kills_of(case: Case, kills: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """The kills at points that the case reaches."""
    match case.name:
        case "closure":
            return [("forward" if point == "before step" else point, step) for point, step in kills]
        case "adversarial" | "kept-gradients":
            # Gradients that the generator leaves on the critic wait until it throws them away, in the second batch.
            kills = [(point, step) for point, step in kills if step > 2]
            return [("before step" if point == "forward" else point, step) for point, step in kills]
        case "idle":  # optimizers step in every third batch only
            return [("forward" if point == "before step" else point, step) for point, step in kills]
    return kills
