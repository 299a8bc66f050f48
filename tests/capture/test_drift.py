"""Which drift is a finding: on a CPU all of it, on an accelerator what is more than rounding."""

from __future__ import annotations

import logging

import pytest

from memckpt.protocol.trainer import Drift
from memckpt.session.protection import DriftReports


def drift(ulp: float, record: int = 32) -> Drift:
    return Drift(record=record, tensor="layer.weight", max_ulp=ulp)


def test_the_first_drift_of_an_accelerator_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    reports = DriftReports(exact=False)
    with caplog.at_level(logging.INFO, "memckpt"):
        assert not any([reports.is_finding(drift(0.0)), reports.is_finding(drift(3.0, 40))])
        assert not reports.is_finding(drift(900.0, 48))
    (said,) = caplog.records
    assert said.levelno == logging.INFO
    assert "layer.weight by 3 ulp at record 40" in said.getMessage()
    assert reports.largest_ulp == 900.0


@pytest.mark.parametrize(("exact", "ulps"), [(True, [1.0]), (False, [2.0, 4096.0]), (False, [1e6]), (True, [2.0, 2.0])])
def test_what_rounding_does_not_explain_is_a_finding(exact: bool, ulps: list[float]) -> None:
    reports = DriftReports(exact)
    *_, last = [reports.is_finding(drift(ulp)) for ulp in ulps]
    assert last


def test_what_the_auditor_finds_is_a_finding_on_an_accelerator_too() -> None:
    """It has allowed for rounding."""
    assert DriftReports(exact=False).is_finding(Drift(40, 3.0, "layer.weight", sure=True))
