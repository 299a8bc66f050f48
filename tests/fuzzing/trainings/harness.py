# What each program begins with. It is copied into the program's text, so that a printed program is a script by itself:
# `python PROGRAM.py` trains with both kills, then once without memckpt, and prints what differs.
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile

import numpy as np
import torch
import torch.nn.functional as F  # noqa: F401 (programs use it)
from torch import nn

import memckpt

RUN = os.environ.get("PROGRAM_RUN", "")
DEVICE = os.environ.get("PROGRAM_DEVICE", "cpu")


def seed(value):
    """Begin with other numbers in an attempt that resumes, if so drawn: what is not restored shows."""
    note("begins", int(os.environ["PROGRAM_NUMBER"]))
    value += int(os.environ["PROGRAM_SEED"])
    torch.manual_seed(value), np.random.seed(value), random.seed(value)


def note(*values):
    with open(os.environ["PROGRAM_NOTES"], "a") as file:
        file.write(json.dumps(values) + "\n")


def at(point, step):
    """Die here, if this is the place and the time."""
    if os.environ.get("PROGRAM_KILL") == f"{point} {step}":
        note("killed")
        os.kill(os.getpid(), signal.SIGKILL)


def plain(value, strides=True):
    """What JSON takes, equal to another if and only if all bits are."""
    if isinstance(value, torch.Tensor):
        raw = (value.detach().to_dense() if value.is_sparse else value.detach()).cpu().contiguous().flatten()
        digest = hashlib.md5(raw.view(torch.uint8).numpy().tobytes() if raw.numel() else b"").hexdigest()[:8]
        return f"{value.dtype} {list(value.shape)} {value.stride() if strides and not value.is_sparse else ''} {digest}"
    if isinstance(value, dict):
        return {str(key): plain(each, strides) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each, strides) for each in value]
    return value.hex() if isinstance(value, float) else value if isinstance(value, (int, str)) else repr(type(value))


def end(model, opts, **others):
    """Note all that an interruption might have changed."""
    note("end", "model", plain(model.state_dict(keep_vars=True)))
    note("end", "buffers", plain(dict(model.named_buffers())))
    note("end", "flags", [[name, p.requires_grad] for name, p in model.named_parameters()])
    note("end", "modes", [[name, module.training] for name, module in model.named_modules()])
    # Element-wise steps take state in any layout; where others do not, losses show it.
    note("end", "optimizers", plain([opt.state_dict() for opt in opts], strides=False))
    device = [] if DEVICE == "cpu" else [torch.get_device_module(DEVICE).get_rng_state()]
    states = [torch.get_rng_state(), *device, np.random.get_state()[1].tolist(), random.getstate()]
    note("end", "generators", plain(states))
    note("end", "others", plain(others))


def noting(restore):
    def restored(session):
        report = restore(session)
        if report is not None:
            note("resumed", report.step, report.exact, str(getattr(report, "reasons", "")))
        return report

    return restored


memckpt.Session.restore_tensors = noting(memckpt.Session.restore_tensors)
memckpt.Session.restore = noting(memckpt.Session.restore)


class Net(nn.Module):
    def __init__(self, body, head):
        super().__init__()
        self.body, self.head = body, head

    def forward(self, x):
        return self.head(self.body(x))


def main(kills, seeds):
    """Train killed at each of `kills` in turn, then undisturbed, in new processes; print what differs."""
    place, stem = tempfile.mkdtemp(prefix="program-"), os.path.basename(__file__).removesuffix(".py")

    def attempt(number, kill, **mine):
        mine |= {"PROGRAM_KILL": kill, "PROGRAM_NUMBER": str(number), "PROGRAM_SEED": str(number * seeds)}
        code = subprocess.call([sys.executable, "-c", f"import {stem}; {stem}.train()"], env={**os.environ, **mine})
        print(f"attempt that dies at {kill or 'no point'!r}: exit code {code}")

    def noted(name):
        with open(f"{place}/{name}") as file:
            lines = [json.loads(line) for line in file]
        print("".join(f"{line}\n" for line in lines if line[0] in ("begins", "resumed")), end="")
        # One that did not resume, since nothing was held yet, had its own numbers, and began everything anew.
        after = [*lines[1:], ["nothing"]]
        begun = max(i for i, line in enumerate(lines) if line[0] == "begins" and after[i][0] != "resumed")
        return lines[begun][1], {str(line[:2]): line[2] for line in lines[begun:] if line[0] in ("loss", "end")}

    for number, kill in enumerate([*kills, ""]):
        attempt(number, kill, PROGRAM_NOTES=f"{place}/killed", PROGRAM_RUN=f"{place}/run")
    begun, found = noted("killed")
    attempt(begun, "", PROGRAM_NOTES=f"{place}/undisturbed", PROGRAM_RUN=f"{place}/none", MEMCKPT_DISABLE="1")
    _, expected = noted("undisturbed")
    wrong = [key for key in {**expected, **found} if expected.get(key) != found.get(key)]
    print("DIFFERENT: " + ", ".join(wrong) if wrong else "EQUAL")
