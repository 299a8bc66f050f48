"""What a Python process is at its script's first line, and behind its imports: as JSON, to the file that is named.

It is run as a script, with -m and with -c.
"""

import sys

_main = sys.modules["__main__"]
_at_start = {
    "main": {
        name: repr(value) if isinstance(value, str | type(None)) else type(value).__name__
        for name, value in vars(_main).items()
        if not name.startswith("_at")
    },
    "argv": list(sys.argv),
    "orig_argv": list(sys.orig_argv),
    "path": list(sys.path),
    "flags": repr(sys.flags),
}


def _describe() -> None:
    import gc
    import json
    import os
    import random
    import resource
    import signal
    import threading
    import warnings
    from pathlib import Path

    def descriptor(fd: str) -> str:
        try:
            return f"{fd} {os.readlink(f'/proc/self/fd/{fd}')} {os.get_inheritable(int(fd))}"
        except FileNotFoundError:
            return ""  # that of the listing

    umask = os.umask(0o22)
    os.umask(umask)
    found: dict[str, object] = {
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "umask": umask,
        "descriptors": sorted(filter(None, map(descriptor, os.listdir("/proc/self/fd")))),
        "streams": [
            (s.name, s.mode, s.encoding, s.errors, s.line_buffering, s.isatty(), s.fileno())
            for s in (sys.stdin, sys.stdout, sys.stderr)
        ],
        "signals": {number: repr(signal.getsignal(number)).split(" at ")[0] for number in signal.valid_signals()},
        "mask": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
        "warnings": [repr(each) for each in warnings.filters],
        "warnoptions": sys.warnoptions,
        "sitecustomize": getattr(sys.modules.get("sitecustomize"), "__file__", None),
        "finders": [repr(each).split(" at ")[0] for each in sys.meta_path],
        "hooks": len(sys.path_hooks),
        "cached": sorted(each for each in sys.path_importer_cache if "memckpt_run/warm_site" in each),
        "threads": threading.active_count(),
        "main thread": threading.main_thread().native_id == os.getpid() == threading.get_native_id(),
        "comm": Path("/proc/self/comm").read_text(),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "parent": os.getppid(),
        "group and session": (os.getpgid(0), os.getsid(0)),
        "children": Path(f"/proc/self/task/{os.getpid()}/children").read_text(),
        "limits": [resource.getrlimit(number) for number in range(16)],
        "cores": sorted(os.sched_getaffinity(0)),
        "oom": Path("/proc/self/oom_score_adj").read_text(),
        "gc": (gc.isenabled(), gc.get_threshold()),
        "recursion": sys.getrecursionlimit(),
        "unraisable": sys.unraisablehook is sys.__unraisablehook__ and sys.excepthook is sys.__excepthook__,
    }
    if (torch := sys.modules.get("torch")) is not None:
        found["torch"] = {
            "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
            "grad": torch.is_grad_enabled(),
            "dtype": str(torch.get_default_dtype()),
            "bits": torch.arange(4096).reshape(64, 64).sin().mm(torch.ones(64, 64)).double().sum().item().hex(),
        }
    fresh: dict[str, float] = {"random": random.random()}
    if (numpy := sys.modules.get("numpy")) is not None:
        fresh["numpy"] = float(numpy.random.random())
    if torch is not None:
        fresh["torch"] = torch.rand(1).item()
        fresh["torch's seed"] = torch.initial_seed()
    answer = {"start": _at_start, "now": found, "fresh": fresh, "pid": os.getpid()}
    Path(sys.argv[1]).write_text(json.dumps(answer))


def main() -> None:
    if "torch" in sys.argv:
        import numpy
        import torch

        assert numpy is not torch
    import decimal
    import sqlite3

    from memckpt.config.observers import observers_from_environment

    assert decimal is not sqlite3
    _describe()
    for each in observers_from_environment():
        each.note_imports()


if __name__ == "__main__":
    main()
