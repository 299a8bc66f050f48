"""What hides of copies over a link: GPT-2 1.5B on one H100 (350 TFLOP/s, 50 GB/s), by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memckpt.state.link_time import LinkTime

PARAMETERS, LINK, FLOPS = 1.5e9, 50e9, 350e12


def link_time(tokens: int, period: int = 8, ranks: int = 1) -> LinkTime:
    each = PARAMETERS / LINK / ranks
    return LinkTime(4 * each, 12 / period * each, 6 * PARAMETERS * tokens / FLOPS, period)


def described(link: LinkTime, waits: float | None = None) -> str:
    return link.describe(PARAMETERS * 5.5, link.exposed_seconds if waits is None else waits, True, 1)


def test_enough_tokens_hide_all_copies() -> None:
    """Gradients take 4 x 350e12 / (4 x 50e9) = 7,000 tokens of a backward, anchors of T=8 no more than 5,250."""
    assert link_time(7000).exposed_seconds == pytest.approx(0, abs=1e-9)
    assert link_time(6900).exposed_seconds > 0
    assert link_time(880, ranks=8).exposed_seconds == 0
    assert link_time(8192, period=1).exposed_seconds > 0
    assert described(link_time(8192)).endswith("ms of a step of 0.211 s, at 50 GB/s; 100% of that hides behind compute")


def test_a_short_step_waits_for_the_link() -> None:
    short = link_time(2048)
    assert short.exposed_seconds == pytest.approx(0.165 - short.compute_seconds)
    found = described(short)
    assert "copies to the host take 165 ms of a step of 0.165 s" in found
    assert "32% of that hides behind compute, and a step waits 112 ms for the rest, 68.1% of it" in found
    for remedy, share in [
        ("anchor_period_steps=64 (to ", link_time(2048, 64).share),
        ("gradients in bf16 (to ", replace(short, gradient_seconds=0.06).share),
        (
            "gradients accumulated over 8 batches (to ",
            replace(short, compute_seconds=8 * short.compute_seconds, batches=8).share,
        ),
        ("4 ranks on a node, which share the copies (to ", link_time(2048, ranks=4).share),
    ]:
        assert remedy + f"{share:.1%})" in found


def test_what_the_formula_does_not_explain_comes_last_in_backward() -> None:
    found = described(link_time(8192), waits=0.006)
    assert found.endswith(
        "ms for the rest: it is what backward makes last, the gradient of a tied embedding for instance"
    )
