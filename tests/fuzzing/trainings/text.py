"""The source text of programs: what is run, and printed."""

from __future__ import annotations

import functools
import re
import textwrap
from pathlib import Path

from tests.fuzzing.trainings.models import MODELS
from tests.fuzzing.trainings.optimizers import OPTIMIZERS, SHARES
from tests.fuzzing.trainings.pieces import PIECES
from tests.fuzzing.trainings.programs import Program
from tests.fuzzing.trainings.steps import DATA, FRAMES, STYLES

#: Steps of a program that draws its batches; epochs of one that has a loader.
STEPS, EPOCHS = 20, 3


def text(program: Program, device: str = "cpu") -> str:
    """The program as a script, with its harness; a plain loop may train on a device."""
    kills = [f"{point} {step}" for point, step in program.kills]
    head = f'"""{textwrap.fill(str(program), 116)}"""'
    tail = f'if __name__ == "__main__":\n    main({kills}, {100 * program.reseeded})\n'
    return "\n\n\n".join(
        [f"{head}\n\n{_harness()}".rstrip(), f"# The program\n\n{_Text(program, device).body()}", tail]
    )


@functools.cache
def _harness() -> str:
    return (Path(__file__).parent / "harness.py").read_text()


class _Text:
    def __init__(self, program: Program, device: str) -> None:
        self._program, self._device = program, device
        self._model, self._data = MODELS[program.model], DATA[program.data]
        self._style = STYLES[program.style]
        self._opts = [OPTIMIZERS[each] for each in program.optimizers]
        self._pieces = [PIECES[each] for each in program.pieces]
        makes = [each.make.format(p=p) for each, p in zip(self._opts, SHARES[program.share], strict=True)]
        self._makes = f"opts = [{', '.join(makes)}]"

    def body(self) -> str:
        """Classes, and ``train()``."""
        write = {
            "plain": self._plain,
            "lightning": self._lightning,
            "manual": self._lightning,
            "accelerate": self._accelerate,
            "trainer": self._trainer,
        }
        tops = [each.top for each in (self._model, *self._opts, self._data, *self._pieces) if each.top]
        *more, train = write[self._program.loop]()
        return "\n\n\n".join(
            [f"CONFIG = {self._program.settings}", *dict.fromkeys(tops), *more, _in("def train():", train)]
        )

    def _all(self, place: str) -> str:
        return _lines(*(getattr(each, place) for each in self._pieces))

    def _loss(self) -> str:
        return next((each.loss for each in self._pieces if each.loss), "F.cross_entropy(model(x), y)")

    def _core(self) -> str:
        """From zeroed gradients to the optimizers' steps."""
        step = _in("for opt in opts:", _lines("opt.step()", self._all("middle")))
        pieces = {"between": self._all("between"), "middle": self._all("middle"), "step": step}
        core = _filled(self._style.text, self._loss(), pieces)
        for each in self._pieces:
            core = _in(each.around, core) if each.around else core
        return core

    def _batch(self, commit: str) -> str:
        return _lines(
            self._data.step,
            "" if self._device == "cpu" else "x, y = x.to(DEVICE), y.to(DEVICE)",
            self._all("start"),
            self._core(),
            'at("stepped", step)',
            self._all("behind"),
            'note("loss", step, float(loss).hex())',
            commit,
            'at("committed", step)',
        )

    def _end(self) -> str:
        return f"end({_arguments('model, opts', *(each.ends for each in self._pieces))})"

    # A plain loop

    def _plain(self) -> tuple[str, ...]:
        arguments = _arguments("model, opts, run_dir=RUN, config=CONFIG", *(each.attach for each in self._pieces))
        batch = self._batch(next((each.commit for each in self._pieces if each.commit), "session.commit()"))
        if self._data.loop:
            loop = _lines(
                "step = report.step if report else 0",
                _in(f"for epoch in session.epochs({EPOCHS}):", _in(self._data.loop, _lines("step += 1", batch))),
            )
        else:
            loop = _lines(
                self._data.before, _in(f"for step in range(report.step + 1 if report else 1, {STEPS + 1}):", batch)
            )
        return (
            _lines(
                "seed(1)",
                f"model = {self._model.make}" + ("" if self._device == "cpu" else ".to(DEVICE)"),
                self._makes,
                self._style.made,
                self._all("made"),
                self._data.made,
                f"session = memckpt.attach({arguments})",
                self._style.attached,
                self._data.attached,
                self._all("attached"),
                "report = session.restore()",
                loop,
                self._end(),
                "session.close()",
            ),
        )

    # Frameworks

    def _lightning(self) -> tuple[str, ...]:
        frame = FRAMES[self._program.loop][self._program.frame]
        number = f"index + 1 + {min(self._data.batches, frame.batches)} * self.current_epoch"
        manual = self._program.loop == "manual"
        names = f"model, opts, step = self.net, self.trainer.optimizers, {number}"
        wrapped = "opts = self.optimizers() if isinstance(self.optimizers(), list) else [self.optimizers()]"
        core = self._core().replace("loss.backward()", "self.manual_backward(loss)")
        step = _lines(
            "x, y = batch",
            names,
            "self.step = step",
            _lines(wrapped, core) if manual else f"loss = {self._loss()}",
            "self.loss = float(loss)",
            "return loss",
        )
        later = names.replace(number, "self.step")
        hooks = [
            _in(
                "def on_train_batch_start(self, batch, index):",
                _lines(names, 'at("committed", step - 1)', self._all("start")),
            ),
            _in("def training_step(self, batch, index):", step),
            _in(
                "def on_train_batch_end(self, outputs, batch, index):",
                _lines(names, 'at("stepped", step)', self._all("behind"), 'note("loss", step, self.loss.hex())'),
            ),
        ]
        if not manual:
            hooks += [
                _in("def on_after_backward(self):", 'at("backward", self.step)'),
                _in(
                    "def on_before_optimizer_step(self, optimizer):",
                    _lines(later, self._all("between"), 'at("between", step)'),
                ),
            ]
        configured = _lines(
            "model, schedules = self.net, []", self._makes, self._all("made"), frame.made, "return opts, schedules"
        )
        made = _lines(
            "super().__init__()",
            f"self.net = {self._model.make}",
            "self.automatic_optimization = False" if manual else "",
        )
        module = _in(
            "class Module(pl.LightningModule):",
            _lines(
                _in("def __init__(self):", made),
                _in("def configure_optimizers(self):", configured),
                *hooks,
                frame.methods,
            ),
        )
        quiet = "logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False"
        arguments = _arguments(f"max_epochs={EPOCHS}, callbacks=callbacks, accelerator='cpu', {quiet}", frame.arguments)
        return (
            "import lightning.pytorch as pl\n\nfrom lightning_memckpt import MemCheckpoint",
            module,
            _lines(
                "seed(1)",
                self._data.made,
                "callbacks = [] if os.environ.get('MEMCKPT_DISABLE') else [MemCheckpoint(RUN, config=CONFIG)]",
                frame.lines,
                "module = Module()",
                f"trainer = pl.Trainer({arguments})",
                "trainer.fit(module, loader)",
                "model, opts = module.net, trainer.optimizers",
                self._end(),
            ),
        )

    def _accelerate(self) -> tuple[str, ...]:
        frame = FRAMES["accelerate"][self._program.frame]
        batch = self._batch("ckpt.commit()").replace("loss.backward()", "accelerator.backward(loss)")
        if "accumulation" in frame.arguments:
            batch = _in("with accelerator.accumulate(model):", batch.replace("\nckpt.commit()", "")) + "\nckpt.commit()"
        arguments = _arguments("cpu=True", frame.arguments)
        step = f"step = {self._data.batches} * epoch + number + 1"
        return (
            "import accelerate\n\nfrom accelerate_plugin import MemCheckpointPlugin",
            _lines(
                "seed(1)",
                f"accelerator = accelerate.Accelerator({arguments})",
                f"model = {self._model.make}",
                self._makes,
                self._all("made"),
                self._data.made,
                "ckpt = MemCheckpointPlugin(accelerator, RUN, config=CONFIG)",
                "model, loader, *opts = ckpt.prepare(model, loader, *opts)",
                _in(
                    f"for epoch in ckpt.epochs({EPOCHS}):",
                    _in("for number, (x, y) in enumerate(loader, start=ckpt.batch):", _lines(step, batch)),
                ),
                self._end(),
                "ckpt.close()",
            ),
        )

    def _trainer(self) -> tuple[str, ...]:
        frame = FRAMES["trainer"][self._program.frame]
        names = "model, opts, step = self.trainer.model.net, [self.trainer.optimizer.optimizer], state.global_step"
        signature = "(self, args, state, control, **others):"
        bodies = {
            "on_step_begin": _lines(f"{names} + 1", 'at("committed", step - 1)', self._all("start")),
            "on_pre_optimizer_step": _lines(f"{names} + 1", self._all("between"), 'at("between", step)'),
            "on_step_end": _lines(names, 'at("stepped", step)', self._all("behind")),
        }
        hooks = [_in(f"def {name}{signature}", body) for name, body in bodies.items()]
        wrapped = _class(
            "class Wrapped(nn.Module):",
            _in("def __init__(self, net):", "super().__init__()\nself.net = net"),
            _in(
                "def forward(self, x, labels):",
                'model, y = self.net, labels\nreturn {"loss": ' + self._loss() + ', "logits": x}',
            ),
        )
        taking = _class(
            "class Taking(transformers.Trainer):",
            _in(
                "def training_step(self, *args, **kwargs):",
                "loss = super().training_step(*args, **kwargs)\n"
                'note("loss", f"{self.state.global_step} {int(self.accelerator.sync_gradients)}", float(loss).hex())\n'
                "return loss",
            ),
        )
        quiet = "report_to=[], disable_tqdm=True, save_strategy='no', use_cpu=True, per_device_train_batch_size=8"
        arguments = _arguments(
            f"'unused', num_train_epochs={EPOCHS * (1 + frame.accumulates)}, {quiet}", frame.arguments
        )
        return (
            "import transformers\n\nfrom transformers_memckpt import protect",
            _class("class Hooks(transformers.TrainerCallback):", *hooks),
            wrapped,
            taking,
            _lines(
                "seed(1)",
                f"model = {self._model.make}",
                self._makes,
                self._all("made"),
                self._data.made,
                "collate = lambda rows: dict(zip(('x', 'labels'), torch.utils.data.default_collate(rows)))",
                f"args = transformers.TrainingArguments({arguments})",
                "hooks = Hooks()",
                "trainer = hooks.trainer = Taking(Wrapped(model), args, collate, loader.dataset, loader.dataset, "
                "callbacks=[hooks], optimizers=(opts[0], None))",
                "if not os.environ.get('MEMCKPT_DISABLE'):\n    protect(trainer, RUN, config=CONFIG)",
                "trainer.train()",
                self._end(),
            ),
        )


def _arguments(*each: str) -> str:
    return ", ".join(one for one in each if one)


def _class(head: str, *methods: str) -> str:
    return _in(head, _lines(*methods))


def _lines(*texts: str) -> str:
    return "\n".join(text for text in texts if text)


def _in(head: str, inner: str) -> str:
    """A block; `head` may be of several lines, of which the last ones are in the block, too."""
    first, *more = head.split("\n")
    return "\n".join([first, *more, textwrap.indent(inner, "    ")])


def _filled(text: str, loss: str, pieces: dict[str, str]) -> str:
    """Put the pieces where a line consists of their name in braces, and the loss wherever it is named."""

    def block(found: re.Match[str]) -> str:
        return textwrap.indent(pieces[found[2]], found[1])

    filled = re.sub(r"^( *)\{(\w+)\}$", block, text.replace("{loss}", loss), flags=re.M)
    lines = [line for line in filled.split("\n") if line.strip()]
    found: list[str] = []
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        found.append(line)
        indent = len(line) - len(line.lstrip())
        if line.endswith(":") and len(after) - len(after.lstrip()) <= indent:
            found.append(" " * (indent + 4) + "pass")  # nothing was put there
    return "\n".join(found)
