"""Fixtures shared by the engine's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.engine_harness import Lab


@pytest.fixture(scope="session")
def _engine_imported() -> None:
    from tests.engine_harness import import_ahead

    import_ahead()


@pytest.fixture
def lab(_engine_imported: None, tmp_path: Path) -> Iterator[Lab]:
    """Starts trainers and agents; afterwards no process, mapping, socket or lock of theirs may be left."""
    from tests.engine_harness import Lab

    lab = Lab(tmp_path)
    try:
        yield lab
        left = lab.left_behind()
    except BaseException:
        lab.left_behind(limit=0.0)
        raise
    finally:
        lab.close()
    assert not left, "left behind:\n" + "\n".join(left)
