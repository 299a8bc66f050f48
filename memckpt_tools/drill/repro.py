"""A script for each failure, which shows it again: for a bug report. That of stock checkpoints does without memckpt."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from memckpt_tools.drill.comparison import STEPS
from memckpt_tools.drill.stock import Blow, Plan, Result
from memckpt_tools.drill.text import divergence, printable

#: Steps of a process that is to come to its own end.
_ALL = 1 << 30
#: Capital words behind ``@`` are replaced.
_SCRIPT = '''\
@SAID
#
# Start this where the command is started, with its Python. It trains in copies of that directory, kills as the drill
# did, starts the command again, and compares. Exit status: 1 the fault is there, 0 it is gone, 2 neither can be said.
import @IMPORTS

COMMAND = @COMMAND
RESUME = @RESUME  # the command behind a kill
# How each process is killed, behind how many of its steps, and how many seconds later; or at how many bytes of a file
# that it saves; or before how many events of files.
KILLS = @KILLS
STEPS = @STEPS  # of the process behind the last kill
PATIENCE, GRACE = @PATIENCE, @GRACE  # seconds until a process has ended, and from SIGTERM to its end


def train(kills):
    """Train in a copy of this directory; returns what each process has told of its steps, and the end of the last."""
    linked, told = {".git", ".venv", "venv", "node_modules"}, []
    skip = lambda at, names: [n for n in names if n in linked or os.path.exists(os.path.join(at, n, ".memckpt-drill"))]
    copy = lambda a, b: os.symlink(os.path.abspath(a), b) if os.path.getsize(a) > 16 << 20 else shutil.copy2(a, b)
    beside = os.path.dirname(os.getcwd())  # from a copy that is there ../data is found
    beside = beside if os.access(beside, os.W_OK) else None
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryDirectory(prefix="repro-", dir=beside) as work:
        shutil.copytree(".", work, True, skip, copy, dirs_exist_ok=True)
        for name in linked.intersection(os.listdir(".")):
            os.symlink(os.path.abspath(name), os.path.join(work, name))
        shutil.copy(__file__, f"{place}/sitecustomize.py")  # each Python of the command imports it
        path = os.pathsep.join(filter(None, [place, os.environ.get("PYTHONPATH")]))
        for number, kill in enumerate(kills, start=1):
            os.mkdir(states := f"{place}/{number}")
            own = {"PYTHONPATH": path, "REPRO": json.dumps([states, *kill]), "PWD": work, "MEMCKPT_DISABLE": "1"}
            command, where = RESUME if number > 1 else COMMAND, {"cwd": work, "env": {**os.environ, **own}}
            with open(f"{place}/output", "w+", errors="replace") as log:
                files = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
                process = subprocess.Popen(command, start_new_session=True, **where, **files)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(PATIENCE)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with all that it has started
                log.seek(0)
                end = f"status {process.wait()}: {(log.read().strip().splitlines() or ['no output'])[-1]}"
            told.append([json.loads(os.readlink(f"{states}/{step}")) for step in range(len(os.listdir(states)))])
            lives = process.returncode == 0 and kill[0] != "term"
            if kill[0] != "end" and (lives or len(told[-1]) <= kill[1]):
                print(f"Neither can be said: process {number} has ended before its kill, {end}")
                sys.exit(2)
    return told, end


def main():
    (*before, last), end = train([*KILLS, ("end", STEPS, 0)])
    print(f"Killed ({KILLS[-1][0]}) behind step {len(before[-1]) - 1} of process {len(before)}, and started again.")
    fault = @FAULT if len(last) > 1 else f"no step is trained, {end}"
    print(f"The fault is there: {fault}" if fault else "The fault is gone.")
    sys.exit(1 if fault else 0)


@COMPARE
def watch(optim):
    """Have this process tell its state before its first step of an optimizer and behind each, and be killed."""
    import torch

    states, how, due, amount = json.loads(os.environ["REPRO"])
    count = 0
@SEE
@STATE
    def tell(optimizer, args, kwargs):
        nonlocal count
        if count == 0 and kwargs == {"closure": None} and not any(each.get("lr", 1) for each in optimizer.param_groups):
            return  # no step of training: so torch's get_state_dict makes the state that is loaded
@TELL
@ORDER
        if count == due and how == "save":
            resource.setrlimit(resource.RLIMIT_FSIZE, (amount, resource.RLIM_INFINITY))
        elif count == due and how != "file":
            if how == "term":
                threading.Timer(amount, os.killpg, (os.getpgrp(), signal.SIGTERM)).start()
            signal.setitimer(signal.ITIMER_REAL, max(amount, 1e-6) + GRACE * (how == "term"))  # SIGALRM ends it
        count += 1

    optim.register_optimizer_step_pre_hook(lambda *args: tell(*args) if count == 0 else None)
    optim.register_optimizer_step_post_hook(tell)


class Finder:
    @staticmethod
    def find_spec(name, path, target=None):
        if name == "torch.optim.optimizer":
            sys.meta_path.remove(Finder)
            spec = importlib.util.find_spec(name)
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (load(module), watch(module))
            return spec


if __name__ == "sitecustomize":
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python asks for an error in its place
    sys.meta_path.insert(0, Finder)
else:
    main()
'''
_TELL = """\
        os.symlink(json.dumps(state(optimizer)), f"{states}/{count}")  # made at once, and never cut off
"""
#: Of several processes the first one tells.
_TELL_AS_FIRST = """\
        ranks = torch.distributed
        if (ranks.get_rank() if ranks.is_initialized() else int(os.environ.get("RANK", 0))) == 0:
            os.symlink(json.dumps(state(optimizer)), f"{states}/{count}")  # made at once, and never cut off
"""
#: Ends a process before it opens a file to write, moves or removes one.
_SEE = """\
    events, below = [], os.path.join(os.getcwd(), "")

    def see(event, args):
        ones, twos = ("os.mkdir", "os.remove", "os.rmdir", "os.truncate"), ("os.link", "os.rename", "os.symlink")
        opens = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        if opens or event in ones or event in twos:
            paths = [each for each in args[: 2 if event in twos else 1] if isinstance(each, (str, bytes))]
            paths = [os.path.abspath(os.fsdecode(each)) for each in paths]
            events.extend([event] * any(each.startswith(below) and "__pycache__" not in each for each in paths))
            if len(events) == amount:
                os.kill(os.getpid(), signal.SIGKILL)

"""
_ORDER = """\
        if how == "file":
            events.clear()
        if how == "file" and count == due:
            sys.addaudithook(see)
"""
#: Lines by which a process tells its parameters, and the value that differs, where a start alone shows no failure.
_STATE = """\
    optimizers = []
@TAP
    def digest(values):
        found = hashlib.blake2b(digest_size=8)
        for value in values:
            if isinstance(value, torch.Tensor):
                value = getattr(value.detach(), "to_local", value.detach)().cpu().contiguous()
                found.update(value.reshape(-1).view(torch.uint8).numpy())
            else:
                found.update(repr(value).encode())
        return found.hexdigest()

    def state(optimizer):
        if not optimizers:
            alive = [one for one in gc.get_objects() if issubclass(type(one), optim.Optimizer) and one is not optimizer]
            optimizers.extend([optimizer, *(one for one in alive if "param_groups" in vars(one))])
        stepped = [(one, each) for one in optimizers for group in one.param_groups for each in group["params"]]
@VALUE
        return digest(each for _, each in stepped if each.requires_grad), value if len(value) < 999 else digest([value])

"""
_NO_STATE = """\
    state = lambda optimizer: None

"""
#: Notes what backward begins with.
_TAP = """\
    losses, backward = [], torch.autograd.backward

    def noting(tensors, *args, **kwargs):
        each = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        losses.extend(one.detach().clone() for one in each if one.numel() == 1)
        backward(tensors, *args, **kwargs)

    torch.autograd.backward = noting

"""
_OTHERS = """\
        own = {id(each) for _, each in stepped}
        modules = [one for one in gc.get_objects() if issubclass(type(one), torch.nn.Module)]
        models = [one for one in modules if any(id(each) in own for each in one.parameters())]
        found = {id(each): each for one in models for each in one.@OTHERS() if id(each) not in own}
        value = digest(sorted(digest([each]) for each in found.values()))
"""
#: What is told beside the parameters, by the kind of what differs.
_VALUES = {
    "loss": """\
        value = str([one.item() for one in losses])
        losses[:] = [] if count else losses  # those before the first step are the first step's
""",
    "state": """\
        value = digest(part for one, each in stepped for _, part in sorted(one.state.get(each, {}).items()))
""",
    "parameter": """\
        value = ""
""",
    "hyperparameters": """\
        groups = [sorted(each.items()) for each in optimizer.param_groups]
        value = str([(k, v) for each in groups for k, v in each if k not in ("params", "initial_lr")])
""",
    "buffer": _OTHERS.replace("@OTHERS", "buffers"),
    "frozen": _OTHERS.replace("@OTHERS", "parameters"),
}
_ALIGNED = """\
def compare(before, last):
    known = {}  # steps, and what was told of them, by parameters: a process goes on from the last step that had its own
    for process in before:
        begin, _ = known.setdefault(process[0][0], (0, process[0][1]))
        known |= {parameters: (step, value) for step, (parameters, value) in enumerate(process[1:], begin + 1)}
    if last[0][0] not in known:
        return "no step has had the parameters that are loaded"
    begin, value = known[last[0][0]]
"""
#: Lines that compare the process after the last kill, by kind of failure: its words, empty if there is no difference.
_COMPARED = {
    "start": "",
    "loaded": _ALIGNED
    + """\
    return "" if last[0][1] == value else f"@WHAT: {last[0][1]} is loaded in place of {value}, which step {begin} had"


""",
    "trained": _ALIGNED
    + """\
    undisturbed = train([("step", begin + len(last) - 1, 0)])[0][0]
    for step, ((_, one), (_, other)) in enumerate(zip(last[1:], undisturbed[begin + 1 :]), begin + 1):
        if one != other:
            return f"@WHAT of step {step}: {one} in place of {other}"
    return ""


""",
    "steps": _ALIGNED
    + """\
    steps, expected = begin + len(last) - 1, len(train([("end", STEPS, 0)])[0][0]) - 1
    return f"training ends behind step {steps} in place of {expected}" if steps != expected else ""


""",
}
_MODULES = (
    "contextlib", "gc", "hashlib", "importlib.util", "json", "os", "resource", "shutil", "signal", "subprocess", "sys",
    "tempfile", "threading",
)  # fmt: skip


def scripts(result: Result, starts: tuple[Sequence[str], Sequence[str]], plan: Plan) -> dict[str, str]:
    """Text of a script for each failure that one can show, by its name; `starts`: the commands, as argument lists.

    A training that does not repeat itself fails beyond a doubt where it does not start again, and there only. What goes
    on from a failure is not another one.
    """
    found: dict[str, str] = {}
    title = f"`memckpt drill --stock`, seed {plan.seed}, "
    patience = math.ceil(plan.silence_seconds + 3 * plan.steps * result.step_seconds)
    filled = {"COMMAND": list(starts[0]), "RESUME": list(starts[1]), "PATIENCE": patience, "GRACE": plan.grace_seconds}
    several = result.ranks > 1
    kills = [_kill(blow) for blow in result.blows]
    for number, blow in enumerate(result.blows, start=1):
        difference = blow.difference
        if blow.resumed is None:
            how, what, steps, said = "start", "", 1, blow.why_none
        elif difference is None or blow.inherited or not result.verdict.repeats:
            continue
        else:
            how = "loaded" if difference.restored else "trained"
            steps = 1 if difference.restored else difference.record - blow.resumed
            what, said = difference.kind, divergence(difference)
        told = {**filled, "KILLS": kills[:number], "STEPS": steps}
        at = f"kill {number} ({blow.kind}) behind step {blow.step}:"
        found[f"repro-kill-{number}.py"] = _script(how, what, f"{title}{at} {said}", told, several)
        if difference is not None and difference.restored and what == "parameter":
            break  # from here on nothing says which step a process goes on from
    missing = next((each for each in result.verdict.differences if each.kind == STEPS), None)
    if missing is not None and all(blow.resumed is not None for blow in result.blows):
        told = {**filled, "KILLS": kills, "STEPS": _ALL}
        said = f"{len(kills)} kills: steps: {missing.text}"
        found["repro-steps.py"] = _script("steps", "parameter", title + said, told, several)
    return found


def _script(how: str, what: str, said: str, told: Mapping[str, Any], several: bool) -> str:
    first, *others = printable(said).strip().splitlines()
    said = " ".join([first.partition("; the last lines of its output")[0], *others[-1:]])
    files = any(kind == "file" for kind, _, _ in told["KILLS"])
    parts = {
        "COMPARE": _COMPARED[how],
        "STATE": _NO_STATE if how == "start" else _STATE,
        "TAP": _TAP if what == "loss" else "\n",
        "VALUE": _VALUES.get(what, _VALUES["parameter"]),
        "TELL": _TELL_AS_FIRST if several else _TELL,
        "SEE": _SEE if files else "",
        "ORDER": _ORDER if files else "",
    }
    script = _SCRIPT
    for name, part in parts.items():
        script = script.replace(f"@{name}\n", part)
    values = {
        **{name: repr(value) for name, value in told.items()},
        "SAID": _comment(said),
        "IMPORTS": ", ".join(name for name in _MODULES if f"{name}." in script),
        "FAULT": '""' if how == "start" else "compare(before, last)",
        "WHAT": what,
    }
    return re.sub(r"@([A-Z]+)", lambda found: values[found[1]], script)


def same_drill(options: Sequence[str], command: Sequence[str], said: str) -> str:
    """Text of a script that makes the same drill of a training that memckpt protects, and has its exit status."""
    return (
        f"{_comment(f'`memckpt drill`: {said}')}\n#\n"
        "# Start this where the command is started, with memckpt. Exit status: 1 the fault is there, 0 it is gone.\n"
        f"import subprocess, sys\n\nOPTIONS = {list(options)!r}\nCOMMAND = {list(command)!r}\n"
        'drill = [sys.executable, "-m", "memckpt", "drill", *OPTIONS, "--", *COMMAND]\n'
        "sys.exit(subprocess.call(drill))\n"
    )


def _comment(said: str) -> str:
    return textwrap.fill(said, 116, initial_indent="# ", subsequent_indent="# ")


def _kill(blow: Blow) -> tuple[str, int, float]:
    """How it was made, behind how many steps of its process, and its seconds, bytes, or number of an event."""
    if blow.file:
        return blow.kind, blow.behind, int(blow.amount)
    return "term" if blow.kind == "term" else "step", blow.behind, round(blow.amount, 6)
