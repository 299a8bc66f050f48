"""Which drift is a finding: on a CPU all of it, on an accelerator what is more than rounding."""

from __future__ import annotations

import logging

import pytest

from memckpt.protocol.trainer import Drift
from memckpt.session.protection import DriftReports


def drift(ulp: float, record: int = 32, rounded: bool = True) -> Drift:
    return Drift(record=record, tensor="layer.weight", max_ulp=ulp, rounded=rounded)


def test_the_first_drift_of_an_accelerator_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    reports = DriftReports(exact=False)
    with caplog.at_level(logging.INFO, "memckpt"):
        assert not any([reports.is_finding(drift(0.0)), reports.is_finding(drift(3.0, 40))])
        assert not reports.is_finding(drift(9e8, 48)), "elements that nearly cancel come out with another sign"
    (said,) = caplog.records
    assert said.levelno == logging.INFO
    assert "layer.weight by 3 ulp at record 40" in said.getMessage()
    assert reports.largest_ulp == 9e8


@pytest.mark.parametrize(("exact", "rounded"), [(True, True), (True, False), (False, False)])
def test_what_rounding_does_not_explain_is_a_finding(exact: bool, rounded: bool) -> None:
    assert DriftReports(exact).is_finding(drift(2.0, rounded=rounded))


def test_what_the_auditor_finds_is_a_finding_on_an_accelerator_too() -> None:
    """It has allowed for rounding."""
    assert DriftReports(exact=False).is_finding(Drift(40, 3.0, "layer.weight", sure=True))
