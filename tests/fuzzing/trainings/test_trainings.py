"""Trainings that nobody has written: composed of ingredients, killed twice, and compared with themselves.

A *program* (:mod:`.programs`) names a model, optimizers, a way to step, a source of batches, up to four more
*ingredients* (:mod:`.ingredients`), settings of memckpt, and two points at which it is killed. It is rendered to source
text (:mod:`.text`), which begins with a fixed harness, and that text is executed (:mod:`.running`) in processes that
are forked from this one: once without memckpt, then killed, killed again, and to its end.

Right is: all bits are equal, and each resume has called itself exact; or it has said at or before a resume that it is
not, where the program has an ingredient that may be said (``said``, a pattern); or the first start was refused with an
error of ours, where that is allowed (``refused``). Wrong is anything else: a difference, a false alarm, a hang, a
traceback, a process that is left. A wrong program is made simpler while it stays wrong, and printed as a script.

``make soak-programs PROGRAMS=5000 SEED=1`` runs as many as one likes, with transformers.Trainer, too.
"""

from __future__ import annotations

import pytest

from tests.fuzzing.trainings.programs import LOOPS, drawn
from tests.fuzzing.trainings.running import import_everything, minimal, run
from tests.fuzzing.trainings.text import text

PROGRAMS = 60
#: Without transformers, which takes longer to import than a dozen programs to run.
_LOOPS = tuple(loop for loop in LOOPS if loop != "trainer")


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    import_everything("lightning.pytorch", "lightning_memckpt", "accelerate_plugin")


@pytest.mark.parametrize("number", range(PROGRAMS))
def test_a_program_is_exact_or_says_so(number: int) -> None:
    program = drawn(number, _LOOPS)
    verdict = run(program)
    assert verdict.kind != "invalid", "\n".join([str(program), verdict.why, *verdict.details])
    if verdict.wrong:
        program, verdict = minimal(program, verdict)
        pytest.fail("\n".join([f"{program}: {verdict.why}", *verdict.details, "", text(program)]), pytrace=False)
