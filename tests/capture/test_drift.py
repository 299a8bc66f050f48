"""What is said of drift: on a CPU all of it, on an accelerator the first, and what is more than rounding."""

from __future__ import annotations

import logging

import pytest

from memckpt.protocol.trainer import Drift
from memckpt.session.drift import DriftReports


def drift(ulp: float, record: int = 32) -> Drift:
    return Drift(record=record, tensor="layer.weight", max_ulp=ulp)


def test_the_first_drift_of_an_accelerator_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    reports = DriftReports(exact=False)
    with caplog.at_level(logging.INFO, "memckpt"):
        assert not any([reports.wants_rewrite(drift(0.0)), reports.wants_rewrite(drift(3.0, 40))])
        assert not reports.wants_rewrite(drift(900.0, 48))
    (said,) = caplog.records
    assert said.levelno == logging.INFO
    assert "layer.weight by 3 ulp at record 40" in said.getMessage()
    assert reports.largest_ulp == 900.0


@pytest.mark.parametrize(("exact", "ulps"), [(True, [1.0]), (False, [2.0, 4096.0]), (False, [1e6]), (True, [2.0, 2.0])])
def test_what_rounding_does_not_explain_is_written_anew(
    caplog: pytest.LogCaptureFixture, exact: bool, ulps: list[float]
) -> None:
    reports = DriftReports(exact)
    *_, last = [reports.wants_rewrite(drift(ulp)) for ulp in ulps]
    assert last
    assert f"off by {ulps[-1]:g} ulp" in caplog.records[-1].getMessage()
    assert caplog.records[-1].levelno == logging.WARNING
