"""How a batch becomes a step, where batches come from, and whose loop it is."""

from __future__ import annotations

import re
from dataclasses import replace
from textwrap import indent
from typing import Any

from tests.fuzzing.trainings.ingredients import Data, Frame, Style, code

# Steps

#: What many steps begin with, by the name that stands for it.
_SHORT = {
    "zero": "for opt in opts:\n    opt.zero_grad()",
    "backward": 'loss.backward()\nat("backward", step)',
    "between": '{between}\nat("between", step)',
}


def _step(text: str) -> str:
    """Source text of a step, with its short lines written out."""
    text = code(text)
    for name, lines in _SHORT.items():
        text = re.sub(rf"^( *)<{name}>$", lambda found, lines=lines: indent(lines, found[1]), text, flags=re.MULTILINE)
    return text


_PLAIN = """
<zero>
loss = {loss}
<backward>
<between>
{step}
"""

STYLES: dict[str, Style] = {
    "plain": Style(_step(_PLAIN), fits="framework"),
    "zeroed behind": Style(
        _step("""
            loss = {loss}
            <backward>
            <between>
            {step}
            <zero>
        """),
        fits="framework",
    ),
    "zeroed in place": Style((_step(_PLAIN).replace("zero_grad()", "zero_grad(set_to_none=False)")), fits="framework"),
    "by the model": Style(_step(_PLAIN.replace("<zero>", "model.zero_grad()"))),
    "never zeroed": Style(
        _step("""
            loss = 0.1 * ({loss})
            <backward>
            <between>
            {step}
        """)
    ),
    "kept in part": Style(
        _step("""
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.mul_(0.5)
            loss = 0.5 * ({loss})
            <backward>
            <between>
            {step}
        """)
    ),
    "closure": Style(
        _step("""
            def closure():
                <zero>
                loss = {loss}
                <backward>
                <between>
                return loss
            loss = opts[0].step(closure)
            {middle}
            for opt in opts[1:]:
                opt.step()
        """),
        fits="!closure",
    ),
    "accumulated": Style(
        _step("""
            <zero>
            for half in range(2):
                loss = ({loss}) / 2
                <backward>
            <between>
            {step}
        """),
        fits="framework",
    ),
    "gradients wait": Style(
        _step("""
            loss = ({loss}) / 3
            <backward>
            if step % 3 == 0:
                {between}
                {step}
                <zero>
        """),
        points=("backward",),
    ),
    "second one rarely": Style(
        _step("""
            loss = {loss}
            <backward>
            <between>
            opts[0].step()
            opts[0].zero_grad()
            {middle}
            if step % 3 == 0:
                for opt in opts[1:]:
                    opt.step()
                    opt.zero_grad()
        """),
        fits="framework",
    ),
    "in turns": Style(
        _step("""
            <zero>
            loss = {loss}
            <backward>
            <between>
            {middle}
            opts[step % len(opts)].step()
        """),
        fits="framework",
    ),
    "twice a commit": Style(
        _step("""
            for half in range(2):
                <zero>
                loss = ({loss}) / (1 + half)
                <backward>
                <between>
                {step}
        """),
        fits="framework",
    ),
    "scaled": Style(
        _step("""
            <zero>
            loss = {loss}
            scaler.scale(loss).backward()
            at("backward", step)
            for opt in opts:
                scaler.unscale_(opt)
            <between>
            for opt in opts:
                scaler.step(opt)
                {middle}
            scaler.update()
        """),
        made='scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)',
        attached='session.register("scaler", scaler)',
        fits="dense !scaler",
    ),
    "scaled and skipped": Style(
        _step("""
            if step in (2, 3, 9, 15):
                x = x * float("inf")
            <zero>
            loss = {loss}
            scaler.scale(loss).backward()
            at("backward", step)
            <between>
            for opt in opts:
                scaler.step(opt)
                {middle}
            scaler.update()
        """),
        made='scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)',
        attached='session.register("scaler", scaler)',
        fits="dense linear !finite !scaler",
    ),
    "skipped by hand": Style(
        _step("""
            <zero>
            loss = {loss}
            <backward>
            <between>
            if step % 4 != 1:
                {step}
        """),
        fits="framework",
    ),
    "sharpness aware": Style(
        _step("""
            <zero>
            loss = {loss}
            <backward>
            with torch.no_grad():
                bumps = [(p, 0.01 * p.grad.to_dense().sign()) for p in model.parameters() if p.grad is not None]
                for p, bump in bumps:
                    p.add_(bump)
            <zero>
            loss = {loss}
            loss.backward()
            with torch.no_grad():
                for p, bump in bumps:
                    p.sub_(bump)
            <between>
            {step}
        """),
        fits="dense",
    ),
    "penalty": Style(
        _step("""
            <zero>
            loss = {loss}
            wanted = [p for p in model.parameters() if p.requires_grad]
            grads = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
            loss = loss + 0.01 * sum(grad.square().sum() for grad in grads if grad is not None)
            <backward>
            <between>
            {step}
        """),
        fits="dense linear twice",
    ),
    "by hand": Style(
        _step("""
            loss = {loss}
            wanted = [p for p in model.parameters() if p.requires_grad]
            for p, grad in zip(wanted, torch.autograd.grad(loss, wanted, allow_unused=True)):
                p.grad = grad
            at("backward", step)
            <between>
            {step}
        """)
    ),
    "without backward": Style(
        _step("""
            with torch.no_grad():
                mezo = torch.Generator().manual_seed(step)
                bumps = [torch.randn(p.shape, generator=mezo) * 0.01 for p in model.parameters()]
                for p, bump in zip(model.parameters(), bumps):
                    p.add_(bump)
                loss = {loss}
                for p, bump in zip(model.parameters(), bumps):
                    p.sub_(2 * bump)
                slope = float(loss - {loss}) / 0.02
                for p, bump in zip(model.parameters(), bumps):
                    p.add_(bump)
                    p.grad = (slope * bump * 100).to(p.dtype)
            at("backward", step)
            <between>
            {step}
        """),
        fits="dense linear",
    ),
    "tried again": Style(
        _step("""
            if step % 5 == 2:
                try:
                    stop = model.head.weight.register_hook(lambda grad: 1 / 0)
                    ({loss}).backward()
                except ZeroDivisionError:
                    stop.remove()
        """)
        + "\n"
        + _step(_PLAIN),
        fits="linear",
    ),
    "step raises": Style(
        _step("""
            <zero>
            loss = {loss}
            <backward>
            {between}
            if step % 5 == 2:
                try:
                    stop = opts[0].register_step_pre_hook(lambda *_: 1 / 0)
                    opts[0].step()
                except ZeroDivisionError:
                    stop.remove()
                    with torch.no_grad():
                        for p in model.parameters():
                            p.mul_(0.99)
            at("between", step)
            {step}
        """)
    ),
    "in backward": Style(
        _step("""
            loss = {loss}
            <backward>
        """),
        made=code("""
            def step_at_once(p, opt):
                opt.step()
                opt.zero_grad()
            opts = [type(opts[0])([p], **{k: v for k, v in opts[0].defaults.items() if k in ("lr", "momentum", "eps")})
                    for p in model.parameters() if p.requires_grad]
            for opt in opts:
                p = opt.param_groups[0]["params"][0]
                p.register_post_accumulate_grad_hook(lambda p, opt=opt: step_at_once(p, opt))
        """),
        points=("backward",),
        fits="dense !first !groups !hooks",
    ),
}

# Data

_DATASET = code("""
    class Samples(torch.utils.data.Dataset):
        def __init__(self, transform=None):
            numbers = torch.Generator().manual_seed(5)
            self.x, self.y = torch.randn(56, 12, generator=numbers), torch.randint(0, 5, (56,), generator=numbers)
            self.transform = transform
        def __len__(self):
            return len(self.x)
        def __getitem__(self, index):
            return self.x[index] if self.transform is None else self.transform(self.x[index]), self.y[index]
""")
_STREAM = code("""
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            for i in range(7):
                numbers = torch.Generator().manual_seed(i)
                yield torch.randn(8, 12, generator=numbers), torch.randint(0, 5, (8,), generator=numbers)
""")
_LOADER = "loader = torch.utils.data.DataLoader(Samples(), batch_size=8, {})"
_FOLLOWED = "session.loader(loader)"
_OVER = "for x, y in loader:"


def _loaded(
    arguments: str = "shuffle=True",
    samples: str = "Samples()",
    *,
    imports: str = "",
    classes: str = "",
    before: str = "",
    more: str = "",
    followed: str = "",
    **places: Any,
) -> Data:
    """Batches of a loader over samples, of which each is a step; `before` and `more` are made around it."""
    made = before + _LOADER.format(arguments).replace("Samples()", samples) + more
    top = imports + _DATASET + ("\n\n" + code(classes) if classes else "")
    return Data(**{"top": top, "made": made, "attached": _FOLLOWED + followed, "loop": _OVER, **places})


def _taken(step: str, before: str, arguments: str = "shuffle=True", **places: Any) -> Data:
    """Batches that the loop takes from the loader itself; `before` comes before the loop."""
    return replace(_loaded(arguments, **places), loop="", step=code(step), before=before)


DATA: dict[str, Data] = {
    "drawn": Data("x, y = torch.randn(8, 12), torch.randint(0, 5, (8,))"),
    "by number": Data(
        "numbers = torch.Generator().manual_seed(step)\n"
        "x, y = torch.randn(8, 12, generator=numbers), torch.randint(0, 5, (8,), generator=numbers)"
    ),
    "numpy and random": Data(
        "x = torch.tensor(np.random.randn(8, 12), dtype=torch.float32) * random.random()\n"
        "y = torch.tensor([random.randrange(5) for _ in range(8)])"
    ),
    "drawn singly": Data(
        "x = torch.tensor([random.gauss(0, 1) + float(np.random.normal()) for _ in range(96)]).view(8, 12)\n"
        "x, y = x + torch.randn(()), torch.randint(0, 5, (8,))"
    ),
    "shuffled": _loaded(),
    "own generator": _loaded("shuffle=True, generator=torch.Generator().manual_seed(7)"),
    "weighted": _loaded(
        "sampler=sampler",
        before="sampler = torch.utils.data.WeightedRandomSampler([1.0 + i % 3 for i in range(56)], 48)\n",
        batches=6,
    ),
    "endless": _taken(
        "x, y = next(batches)",
        "batches = cycle(loader)",
        classes="""
            def cycle(loader):
                while True:
                    yield from loader
        """,
    ),
    "iterator made again": _taken(
        """
            try:
                x, y = next(batches)
            except StopIteration:
                batches = iter(loader)
                x, y = next(batches)
        """,
        "batches = iter(loader)",
        "shuffle=True, drop_last=True",
    ),
    "subset": _loaded(
        samples="torch.utils.data.ConcatDataset(parts)",
        before="numbers = torch.Generator().manual_seed(3)\n"
        "parts = torch.utils.data.random_split(Samples(), [50, 6], generator=numbers)\n",
    ),
    "stateful": _loaded(
        imports="import torchdata.stateful_dataloader\n\n\n",
        made=_LOADER.format("shuffle=True").replace(
            "torch.utils.data.DataLoader", "torchdata.stateful_dataloader.StatefulDataLoader"
        ),
    ),
    "prefetched": _taken(
        "(x, y), ahead = ahead, next(batches)",
        "batches = iter(loader)\nahead = next(batches)",
        top=_DATASET.replace("56", "400"),
        said="ahead|fetch|position|read",
    ),
    "converted ahead": _taken(
        "(x, y), ahead = ahead, [each + 0 for each in next(batches)]",
        "batches = iter(loader)\nahead = [each + 0 for each in next(batches)]",
        top=_DATASET.replace("56", "400"),
        said="ahead|fetch|position|read",
    ),
    "read before the loop": _loaded(
        more="\nmost = max(x.max() for x, y in loader)",
        followed="\nmost += max(x.max() for x, y in loader)",
        loop="for x, y in loader:\n    x = x / most",
    ),
    "with a cycle": _loaded(
        imports="import itertools\n\n\n",
        more="\n" + _LOADER.format("shuffle=True").replace("loader =", "second =").replace("Samples()", "range(24)"),
        followed="\nsession.loader(second)",
        loop="for (x, y), z in zip(loader, itertools.cycle(second)):\n    x = x + 0.01 * z[:, None]",
        said="itertools.cycle",
    ),
    "zipped with itself": _loaded(
        loop="for (x, y), (x2, _) in zip(loader, loader):\n    x = 0.7 * x + 0.3 * x2",
        said="loader|pass|iterat",
        refused="loader|pass|iterat",
    ),
    "two loaders": _loaded(
        more="\n"
        + _LOADER.format("shuffle=True, generator=torch.Generator().manual_seed(8)").replace("loader =", "second ="),
        followed="\nsession.loader(second)",
        loop="for (x, y), (x2, _) in zip(loader, second):\n    x = 0.7 * x + 0.3 * x2",
    ),
    "transform with a generator": _loaded(
        samples="Samples(Jitter())",
        classes="""
            class Jitter:
                def __init__(self):
                    self.rng = np.random.default_rng(3)
                def __call__(self, x):
                    return x + float(self.rng.normal())
        """,
    ),
    "pipeline of transforms": _loaded(
        samples="Samples(Chain(Scale(1), Scale(2)))",
        classes="""
            class Scale:
                def __init__(self, seed):
                    self.own = {"numbers": torch.Generator().manual_seed(seed), "chance": random.Random(seed)}
                def __call__(self, x):
                    x = x * (1 + 0.1 * torch.randn((), generator=self.own["numbers"]))
                    return x + 0.1 * self.own["chance"].random()

            class Chain:
                def __init__(self, *steps):
                    self.steps = list(steps)
                def __call__(self, x):
                    for step in self.steps:
                        x = step(x)
                    return x
        """,
    ),
    "collating with a generator": _loaded(
        "shuffle=True, collate_fn=Mix()",
        classes="""
            class Mix:
                def __init__(self):
                    self.rng = random.Random(4)
                def __call__(self, samples):
                    x, y = torch.utils.data.default_collate(samples)
                    return x * self.rng.random(), y
        """,
    ),
    "sampler with a list": _loaded(
        "sampler=Reshuffled()",
        classes="""
            class Reshuffled:
                def __init__(self):
                    self.order = list(range(56))
                def __len__(self):
                    return 56
                def __iter__(self):
                    random.shuffle(self.order)
                    return iter(list(self.order))
        """,
        said="sampler",
        refused="sampler",
    ),
    "sampler without a length": _taken(
        "x, y = next(batches)",
        "batches = iter(loader)",
        "sampler=Endless()",
        classes="""
            class Endless:
                def __iter__(self):
                    while True:
                        yield int(torch.randint(0, 56, ()))
        """,
        said="sampler",
        refused="sampler",
    ),
    "batch sampler": _loaded(
        classes="""
            class Lengths:
                def __init__(self):
                    self.numbers = torch.Generator().manual_seed(11)
                def __len__(self):
                    return 6
                def __iter__(self):
                    order = torch.randperm(56, generator=self.numbers).tolist()
                    return iter([order[i : i + 4 + i % 5] for i in range(0, 48, 8)])
        """,
        made=_LOADER.replace("batch_size=8, ", "").format("batch_sampler=Lengths()"),
        batches=6,
    ),
    "stream": _loaded(top=_STREAM, made="loader = torch.utils.data.DataLoader(Stream(), batch_size=None)"),
    "stream that draws": _loaded(
        top=_STREAM.replace("yield torch.randn(", "yield torch.rand(()) + torch.randn("),
        made="loader = torch.utils.data.DataLoader(Stream(), batch_size=None)",
        said="stream",
    ),
    "workers": _loaded("shuffle=True, num_workers=1", "Samples(lambda x: x + 0.1 * torch.rand(()))"),
}

# Frameworks

FRAMES: dict[str, dict[str, Frame]] = {
    "lightning": {
        "plainly": Frame(),
        "clip norm": Frame("gradient_clip_val=0.5"),
        "clip value": Frame("gradient_clip_val=0.02, gradient_clip_algorithm='value'"),
        "accumulates": Frame("accumulate_grad_batches=2", accumulates=True),
        "part of an epoch": Frame("limit_train_batches=5", batches=5),
        "low precision": Frame("precision='bf16-mixed'"),
        "validates": Frame(
            "val_check_interval=3",
            methods=code("""
                def validation_step(self, batch, index):
                    self.log("validated", F.cross_entropy(self.net(batch[0]), batch[1]))
                def val_dataloader(self):
                    return torch.utils.data.DataLoader(Samples(), batch_size=16)
            """),
        ),
        "schedule": Frame(
            made="schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opts[0], 24)\n"
            "schedules = [{'scheduler': schedule, 'interval': 'step'}]",
            fits="!lr",
        ),
        "own clipping": Frame(
            methods=code("""
                def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
                    for p in self.parameters():
                        if p.grad is not None:
                            p.grad.div_(p.grad.norm() + 1e-3)
            """)
        ),
        "own accumulation": Frame(
            methods=code("""
                def optimizer_step(self, epoch, index, optimizer, closure=None):
                    if index % 3 == 2:
                        optimizer.step(closure=closure)
                    else:
                        closure()
                def optimizer_zero_grad(self, epoch, index, optimizer):
                    if index % 3 == 0:
                        optimizer.zero_grad()
            """),
            accumulates=True,
        ),
        "frozen per epoch": Frame(
            methods=code("""
                def on_train_epoch_start(self):
                    self.net.body.eval()
                    self.net.body.requires_grad_(self.current_epoch != 1)
            """),
            fits="!flags !modes",
        ),
        "average of weights": Frame(
            lines="callbacks.append(pl.callbacks.WeightAveraging(avg_fn=lambda mean, new, n: 0.9 * mean + 0.1 * new))",
            fits="!copy",
        ),
        "accumulates by schedule": Frame(
            lines="callbacks.append(pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 3}))", accumulates=True
        ),
    },
    "manual": {"plainly": Frame(), "part of an epoch": Frame("limit_train_batches=5", batches=5)},
    "accelerate": {
        "plainly": Frame(),
        "accumulates": Frame("gradient_accumulation_steps=3"),
        "stateful": Frame("dataloader_config=accelerate.DataLoaderConfiguration(use_stateful_dataloader=True)"),
        "seedable": Frame("dataloader_config=accelerate.DataLoaderConfiguration(use_seedable_sampler=True)"),
    },
    "trainer": {
        "plainly": Frame(),
        "accumulates": Frame("gradient_accumulation_steps=2", accumulates=True),
        "no clipping": Frame("max_grad_norm=0.0"),
        "evaluates": Frame("eval_strategy='steps', eval_steps=4"),
        "cosine": Frame("lr_scheduler_type='cosine', warmup_steps=4", fits="!lr"),
    },
}
