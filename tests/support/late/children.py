"""Children in which the late device is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from tests.support.cluster.processes import run_child
from tests.support.late import device as late


def run_in_child(body: Callable[[], None], log: Path) -> None:
    """Run `body` where the device is loaded; the pytest process must not have one."""

    def with_device() -> None:
        late.load()
        body()

    pid = os.fork()
    if pid == 0:
        run_child(with_device, log)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == 0, log.read_text()[-4000:]
