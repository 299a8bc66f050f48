"""A disk that fails as a test says, in processes that start with this directory on their PYTHONPATH.

Every way of memckpt to a disk ends in `os.fsync`, by which a medium reports what became of earlier writes. The file
that `MEMCKPT_TEST_DISK` names says how it answers: empty or missing (well), "full", "errors" or "slow SECONDS".
"""

import errno
import os
import time

_ANSWERS = os.environ.get("MEMCKPT_TEST_DISK", "")
_FAILURES = {"full": errno.ENOSPC, "errors": errno.EIO}

if _ANSWERS:
    _fsync = os.fsync

    def _fsync_of_a_test(fd):  # type: ignore[no-untyped-def]  # read at every start of Python: no imports for types
        try:
            with open(_ANSWERS) as file:
                answer = file.read().split()
        except FileNotFoundError:
            answer = []
        if answer and answer[0] in _FAILURES:
            raise OSError(_FAILURES[answer[0]], os.strerror(_FAILURES[answer[0]]))
        if answer and answer[0] == "slow":
            time.sleep(float(answer[1]))
        _fsync(fd)

    os.fsync = _fsync_of_a_test
