"""Runs in a Python that `memckpt run` starts as the training's: imports ahead, and waits in here before the script.

Each attempt is a fork that leaves this module, and in which Python goes on to the script as after any start.
"""

import importlib
import os
import sys


def _begin() -> bool:
    """Returns in attempts only; whether there is another sitecustomize, which has taken this one's place."""
    number, _, before = os.environ.pop("MEMCKPT_WARM").partition(":")
    place = os.path.dirname(__file__)
    if before == "-":
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before.removeprefix("+")
    sys.path.remove(place)
    sys.path_importer_cache.pop(place, None)
    sys.modules.pop(__name__)
    try:
        try:
            importlib.import_module(__name__)  # the user's own, if there is one
        except ModuleNotFoundError as error:
            if error.name != __name__:
                raise
        from memckpt_run.warm_process import serve

        serve(int(number))
    except BaseException:  # told in full and fatal: site itself would print a line, and start the script
        import traceback

        traceback.print_exc()
        os._exit(70)
    return __name__ in sys.modules


if "MEMCKPT_WARM" in os.environ and not _begin():
    # What Python takes for "there is no such module".
    raise ModuleNotFoundError("no sitecustomize", name=__name__)
