"""What may stand at each place of a loop, or change in the course of a training."""

from __future__ import annotations

from tests.fuzzing.trainings.ingredients import Piece, code

_GRADS = "for p in model.parameters():\n    if p.grad is not None:\n        {}"
_WEIGHTS = "for p in model.parameters():\n    {}"
_NO_GRAD = "with torch.no_grad():\n    for p in model.parameters():\n        {}"


def _schedule(made: str, behind: str = "schedule.step()", fits: str = "!lr !tensor") -> Piece:
    """A schedule of the first optimizer's rate, which is registered."""
    return Piece(made=made, attached="session.register('schedule', schedule)", behind=behind, fits=fits)


def _still(change: str) -> Piece:
    """A layer that nobody trains, which is changed once."""
    return Piece(
        made="model.still = nn.Linear(12, 5).requires_grad_(False)",
        start=f"if step == 9:\n    {change}",
        loss="F.cross_entropy(model(x) + 0.1 * model.still(x), y)",
        fits="linear !loss !copy",
    )


def _average(first: str, update: str, ends: str, said: str = "") -> Piece:
    """An average as tutorials write it, of a class without a state."""
    return Piece(
        top="import copy\nclass EMA:\n"
        "    def __init__(self, model):\n"
        f"        self.shadow = {first}\n"
        "    def update(self, model):\n"
        f"        for n, p in model.named_parameters():\n            {update}",
        made="model.ema = EMA(model)",
        behind="model.ema.update(model)",
        ends=f"shadow=model.ema.shadow{ends}",
        fits="!copy !extra",
        said=said,
    )


_CLONES = "{n: p.data.clone() for n, p in model.named_parameters()}"
_NOT_CARRIED = "not carried"


def _target(follow: str) -> Piece:
    """A copy of the head that follows it every few steps."""
    return Piece(
        top="import copy",
        made="model.target = copy.deepcopy(model.head).requires_grad_(False)",
        behind=f"if step % 5 == 0:\n    {follow}",
        loss="F.cross_entropy(model(x), y) + 0.1 * (model.head.weight - model.target.weight).square().sum()",
        fits="linear !loss !copy",
    )


def _spread(**more: str) -> Piece:
    """A parameter in no module."""
    return Piece(
        made="spread = nn.Parameter(torch.zeros(3))\nopts[0].add_param_group({'params': [spread]})",
        loss="F.cross_entropy(model(x), y) * torch.exp(-spread.sum()) + 0.1 * spread.sum()",
        ends="spread=spread",
        fits="!loss !groups !extra !first",
        **more,  # type: ignore[arg-type]
    )


PIECES: dict[str, Piece] = {
    # between backward and step
    "clip norm": Piece(between="torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)", fits="dense framework"),
    "clip value": Piece(between="torch.nn.utils.clip_grad_value_(model.parameters(), 0.02)", fits="dense framework"),
    "clip norm foreach": Piece(
        between="torch.nn.utils.clip_grad_norm_([*model.parameters()], 0.3, norm_type=1.0, foreach=True)",
        fits="dense linear",
    ),
    "clip each by itself": Piece(
        between="for p in model.parameters():\n    torch.nn.utils.clip_grad_norm_([p], 0.1)", fits="dense"
    ),
    "scale by hand": Piece(between=_GRADS.format("p.grad.mul_(0.5 + 1 / step)"), fits="framework"),
    "scale through data": Piece(between=_GRADS.format("p.grad.data.mul_(0.7)"), fits="framework"),
    "noise on gradients": Piece(
        between=_GRADS.format("p.grad.add_(0.01 * torch.randn_like(p.grad))"), fits="dense framework"
    ),
    "normalized gradients": Piece(between=_GRADS.format("p.grad.div_(p.grad.norm() + 1e-3)"), fits="dense framework"),
    "new gradient": Piece(between=_GRADS.format("p.grad = p.grad * 0.5 + 0.01 * p.detach()"), fits="dense"),
    "gradient taken away": Piece(between="if step % 3 == 1:\n    model.head.weight.grad = None", fits="linear"),
    "gradient of one row": Piece(
        between="if step % 2 == 0 and model.head.bias.grad is not None:\n    model.head.bias.grad[0] = 0.25",
        fits="linear",
    ),
    "decay before step": Piece(between=_NO_GRAD.format("p.mul_(0.99)"), fits="framework"),
    "decay through data": Piece(between=_WEIGHTS.format("p.data.mul_(0.99)"), fits="framework"),
    "one weight through data": Piece(
        between="model.head.weight.data[step % 5, step % 12] *= 0.5", fits="linear framework", said="DIFFERENT"
    ),
    "clamp before step": Piece(between=_NO_GRAD.format("p.clamp_(-0.2, 0.2)"), fits="linear framework"),
    "rate before step": Piece(between="opts[0].param_groups[0]['lr'] = 0.03 / (1 + step)", fits="!lr framework"),
    # between two optimizers' steps
    "clamp between optimizers": Piece(
        middle="for p in model.body.parameters():\n    p.data.clamp_(-0.1, 0.1)", fits="linear"
    ),
    "decay between optimizers": Piece(middle=_NO_GRAD.format("p.mul_(0.995)")),
    "rate between optimizers": Piece(middle="opts[-1].param_groups[0]['lr'] = 0.02 / (1 + step)", fits="!lr"),
    # behind the step
    "clamp weights": Piece(behind=_NO_GRAD.format("p.clamp_(-0.3, 0.3)"), fits="linear framework"),
    "clamp through data": Piece(
        behind=_WEIGHTS.format("p.data.clamp_(-0.3, 0.3)"), fits="linear framework", said="DIFFERENT"
    ),
    "one weight behind the step": Piece(
        behind="if step % 3 == 0:\n    model.head.weight.data[step % 5, step % 12] += 0.1", fits="linear framework"
    ),
    "one moment through data": Piece(
        behind=code("""
            for value in [value for state in opts[0].state.values() for value in state.values()]:
                if step % 4 == 0 and isinstance(value, torch.Tensor) and value.numel() and value.is_floating_point():
                    value.data[(0,) * value.ndim] += 0.1
        """),
        fits="framework",
    ),
    "rebinding weights": Piece(behind=_WEIGHTS.format("p.data = p.data * 0.999"), fits="framework"),
    "noise on weights": Piece(
        behind="if step % 4 == 0:\n    with torch.no_grad():\n"
        "        model.head.weight.add_(0.01 * torch.randn_like(model.head.weight))",
        fits="linear framework",
    ),
    "head anew": Piece(behind="if step == 9:\n    model.head.reset_parameters()", fits="linear framework"),
    "decay behind step": Piece(behind=_NO_GRAD.format("p.mul_(0.99)"), fits="framework"),
    "state by hand": Piece(
        behind=code("""
            if step == 10:
                for state in opts[0].state.values():
                    for value in state.values():
                        if isinstance(value, torch.Tensor) and value.ndim:
                            value.zero_()
        """),
        fits="framework",
        said="state",
    ),
    "state cleared": Piece(behind="if step == 10:\n    opts[0].state.clear()", fits="!first framework", said="state"),
    "state loaded": Piece(
        behind="if step == 10:\n    opts[0].load_state_dict(opts[0].state_dict())", fits="!first framework"
    ),
    # what a session is asked before it is restored
    "held read first": Piece(attached="held = session.held.step if session.held else 0", fits="!held"),
    # gradients of the last step, read before they are zeroed
    "rate from an average of old gradients": Piece(
        start=code("""
            there = [p.grad for p in model.parameters() if p.grad is not None and not p.grad.is_sparse]
            if there:
                group, norm = opts[0].param_groups[0], float(torch.nn.utils.get_total_norm(there))
                group["average"] = 0.8 * group.get("average", norm) + 0.2 * norm
                group["lr"] = 0.03 / (1 + group["average"])
        """),
        fits="!lr framework",
        said="gradients of the resumed step|DIFFERENT",
    ),
    # rates, groups
    "rate by step": Piece(
        start="for opt in opts:\n    opt.param_groups[0]['lr'] = 0.05 / (1 + step)", fits="!lr framework"
    ),
    "rate from numpy": Piece(start="opts[0].param_groups[0]['lr'] = np.float32(0.04 / step)", fits="!lr"),
    "decay switched off": Piece(
        start="if step == 10:\n    for opt in opts:\n        for group in opt.param_groups:\n"
        "            if 'weight_decay' in group:\n                group['weight_decay'] = 0.0",
        fits="framework",
    ),
    "nesterov switched on": Piece(
        start="if step == 8 and 'nesterov' in opts[0].defaults:\n"
        "    opts[0].param_groups[0].update(momentum=0.9, nesterov=True, dampening=0)",
        fits="framework",
    ),
    "foreach switched on": Piece(
        start="if step == 8 and 'foreach' in opts[0].defaults and not opts[0].defaults.get('fused'):\n"
        "    opts[0].param_groups[0]['foreach'] = True",
        fits="!tensor",
    ),
    "betas by step": Piece(
        start="if 'betas' in opts[0].defaults:\n    opts[0].param_groups[0]['betas'] = (0.9 - 0.01 * step, 0.99)",
        fits="framework",
    ),
    "rate from old gradients": Piece(
        start="norm = sum(float(p.grad.to_dense().norm()) for p in model.parameters() if p.grad is not None)\n"
        "opts[0].param_groups[0]['lr'] = 0.05 / (1 + norm)",
        fits="!lr framework",
        said="gradients of the resumed step|DIFFERENT",
    ),
    "group added": Piece(
        top=code("""
            def with_late(model):
                model.late = nn.Linear(12, 5)
                model.register_forward_hook(lambda model, inputs, out: out + 0.1 * model.late(inputs[0]))
                return model
        """),
        made="model = with_late(model)\nlate = list(model.late.parameters())",
        start="if step == 7 and not any(late[0] is p for group in opts[0].param_groups for p in group['params']):\n"
        "    opts[0].add_param_group({'params': late})",
        fits="linear !groups !first !copy !tensor",
    ),
    "groups swap": Piece(
        start="if step in (9, 15) and len(opts[0].param_groups) == 2:\n    a, b = opts[0].param_groups\n"
        "    a['params'], b['params'] = b['params'], a['params']",
        fits="!groups",
    ),
    "groups in another order": Piece(start="if step == 9:\n    opts[0].param_groups.reverse()", fits="!groups"),
    "members in another order": Piece(
        start="if step == 9:\n    opts[0].param_groups[0]['params'].reverse()", fits="!groups"
    ),
    "one rate tensor": Piece(
        made="rate = torch.tensor(0.02)\nfor group in opts[0].param_groups:\n    group.update(lr=rate, foreach=False)",
        start="rate.mul_(0.97)",
        fits="!lr !tensor",
    ),
    "words in a group": Piece(
        made="opts[0].param_groups[0].update(name='body', layers=[0, 1], numbers={'a': 1.5})",
        start="opts[0].param_groups[0]['numbers']['a'] += step",
        ends="numbers=opts[0].param_groups[0]['numbers']",
        fits="!groups",
    ),
    "function in a group": Piece(
        made="opts[0].param_groups[0]['rule'] = lambda step: 0.05 / step",
        start="opts[0].param_groups[0]['lr'] = opts[0].param_groups[0]['rule'](step)",
        fits="!lr !groups",
        said="group|rule",
        refused="group|rule",
    ),
    # schedules and averages
    "cosine": _schedule("schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opts[0], 24)"),
    "one cycle": _schedule(
        "schedule = torch.optim.lr_scheduler.OneCycleLR(opts[0], 0.05, 60, cycle_momentum=False)",
        fits="!lr !tensor !groups",  # groups that are added have no rates of their own
    ),
    "plateau": _schedule(
        "schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(opts[0], patience=1)",
        behind="schedule.step(float(loss))",
    ),
    "warm up and lambda": _schedule("schedule = torch.optim.lr_scheduler.LambdaLR(opts[0], lambda n: 1 / (1 + n))"),
    "schedule unregistered": Piece(
        made="schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opts[0], 24)",
        behind="schedule.step()",
        fits="!lr !tensor",
        said="[Ss]chedul",
    ),
    "plateau unregistered": Piece(
        made="schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(opts[0], patience=1)",
        behind="schedule.step(loss.detach())",
        fits="!lr !tensor",
        said="[Ss]chedul",
    ),
    "average hidden": Piece(
        top="import copy",
        made="model.hidden = [copy.deepcopy(model.head).requires_grad_(False)]",
        behind="model.hidden[0].bias.lerp_(model.head.bias.detach(), 0.1)",
        ends="hidden=model.hidden[0].state_dict()",
        fits="linear !copy !extra !width",
    ),
    "average of a class replaced": _average(
        _CLONES, "self.shadow[n] = 0.9 * self.shadow[n] + 0.1 * p.data", "", _NOT_CARRIED
    ),
    "average of a class written": _average(
        _CLONES, "self.shadow[n].mul_(0.9).add_(p.data, alpha=0.1)", "", _NOT_CARRIED
    ),
    "average of a class copied": _average(
        "copy.deepcopy(model)", "self.shadow.get_parameter(n).data.lerp_(p.data, 0.1)", ".state_dict()"
    ),
    "average in a variable": Piece(
        top="import copy",
        made="average = copy.deepcopy(model).requires_grad_(False)",
        behind="for a, p in zip(average.parameters(), model.parameters()):\n    a.data.lerp_(p.data, 0.1)",
        ends="average=average.state_dict()",
        fits="linear !copy !extra !width",
        said=f"the variable average .*{_NOT_CARRIED}",
    ),
    "average in a dict of a variable": Piece(
        made=f"shadow = {_CLONES}",
        behind="for n, p in model.named_parameters():\n    shadow[n] = 0.9 * shadow[n] + 0.1 * p.data",
        ends="shadow=shadow",
        fits="!copy !extra",
        said=f"the variable shadow .*{_NOT_CARRIED}",
    ),
    "gradients copied": Piece(between="copies = [p.grad.clone() for p in model.parameters() if p.grad is not None]"),
    "weights copied": Piece(start=f"before = {_CLONES}"),
    "activation replaced": Piece(
        made="model.last = nn.Tanh()",
        start="if step == 8:\n    model.last = nn.GELU()",
        loss="F.cross_entropy(model.last(model(x)), y)",
        fits="!loss",
        said="had become a GELU",
    ),
    "hook hung up": Piece(
        start="if step == 8:\n    model.head.weight.register_hook(lambda gradient: gradient * 0.5)",
        fits="linear !hooks !flags",
        said="had got the hook",
    ),
    "hook of the step hung up": Piece(
        start="if step == 8:\n"
        "    opts[0].register_step_pre_hook(lambda opt, *rest: ([p.grad.mul_(0.5) for group in opt.param_groups "
        "for p in group['params'] if p.grad is not None], None)[1])",
        fits="!hooks !flags",
        said="had got the hook",
    ),
    "meters nested": Piece(
        top="class Mean:\n"
        "    mean = 0.0\n"
        "    def state_dict(self):\n        return {'mean': self.mean}\n"
        "    def load_state_dict(self, state):\n        self.mean = state['mean']",
        made="model.meters = {'train.loss': {1: Mean()}}\nkept = model.meters['train.loss'][1]",
        loss="F.cross_entropy(model(x), y) * (1 + 0.1 * kept.mean)",
        behind="kept.mean = 0.9 * kept.mean + 0.1 * float(loss.detach())",
        fits="!loss",
    ),
    "picture of the data": Piece(start="if step % 4 == 3:\n    picture = next(iter(loader))", fits="!data"),
    "average registered": Piece(
        made="average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)",
        attach="extra_modules={'average': average}",
        behind="average.update_parameters(model)",
        ends="average=average.state_dict()",
        fits="linear !copy !extra",
    ),
    "average by hand": Piece(
        made="mean = nn.Linear(20, 5).requires_grad_(False)\n"
        "mean.load_state_dict({'weight': torch.zeros(5, 20), 'bias': torch.zeros(5)})",
        attach="extra_modules={'mean': mean}",
        behind="mean.bias.lerp_(model.head.bias.detach(), 0.1)",
        ends="mean=mean.state_dict()",
        fits="default !extra !width",
    ),
    "target copied": _target("model.target = copy.deepcopy(model.head).requires_grad_(False)"),
    "target loaded": _target("model.target.load_state_dict(model.head.state_dict())"),
    # freezing, replacing, resizing
    "frozen later": Piece(start="if step == 8:\n    model.body.requires_grad_(False)", fits="linear !flags framework"),
    "unfrozen later": Piece(
        made="model.body.requires_grad_(False)",
        start="if step == 8:\n    model.body.requires_grad_(True)",
        fits="linear !flags !first",
    ),
    "frozen in turns": Piece(
        start="model.head.weight.requires_grad_(step % 4 != 3)", fits="linear !flags !hooks framework"
    ),
    "extra module frozen": Piece(
        made="tail = nn.Linear(5, 5)\nopts[0].add_param_group({'params': [*tail.parameters()]})",
        attach="extra_modules={'tail': tail}",
        start="if step == 10:\n    tail.requires_grad_(False)",
        loss="F.cross_entropy(tail(model(x)), y)",
        ends="tail=tail.state_dict(), flags=[p.requires_grad for p in tail.parameters()]",
        fits="linear !loss !extra !groups !first",
    ),
    "frozen weight replaced": _still(
        "model.still.weight = nn.Parameter(model.still.weight * 1.5, requires_grad=False)"
    ),
    "still module replaced": _still("model.still = nn.Linear(12, 5).requires_grad_(False)"),
    "assigned": _still(
        "model.still.load_state_dict({'weight': torch.ones(5, 12), 'bias': torch.ones(5)}, assign=True)"
    ),
    "late buffer": Piece(
        made="model.register_buffer('late_scale', None)",
        start="if step >= 8:\n    now = x.detach().abs().mean()\n"
        "    model.late_scale = now if model.late_scale is None else 0.9 * model.late_scale + 0.1 * now",
        loss="F.cross_entropy(model(x) * (1 if model.late_scale is None else model.late_scale), y)",
        fits="!loss !finite !copy",
    ),
    "buffer grows": Piece(
        made="model.register_buffer('memory', torch.zeros(1, 5))",
        behind="model.memory = torch.cat([model.memory, loss.detach().view(1, 1).expand(1, 5)])[-6:]",
        loss="F.cross_entropy(model(x) + model.memory.mean(0), y)",
        fits="!loss !copy",
    ),
    "parameter replaced with its group": Piece(
        start=code("""
            if step == 9:
                old = model.head.weight
                model.head.weight = nn.Parameter(old.detach() * 0.5)
                for opt in opts:
                    for group in opt.param_groups:
                        group["params"] = [model.head.weight if p is old else p for p in group["params"]]
                    opt.state.pop(old, None)
        """),
        fits="linear !groups !first !hooks",
    ),
    "layer wider": Piece(
        start=code("""
            if step == 9:
                old = model.head
                model.head = nn.Linear(old.in_features, 5 + 1, dtype=old.weight.dtype)
                for opt in opts:
                    for group in opt.param_groups:
                        new = {id(old.weight): model.head.weight, id(old.bias): model.head.bias}
                        group["params"] = [new.get(id(p), p) for p in group["params"]]
                    for p in old.parameters():
                        opt.state.pop(p, None)
        """),
        fits="linear !groups !first !hooks !loss !width",
        said="shape|size|head",
    ),
    # modes
    "body in eval": Piece(start="if step == 10:\n    model.body.eval()", fits="!modes framework"),
    "eval in turns": Piece(start="model.body.train(step % 3 > 0)", fits="!modes framework"),
    "evaluated": Piece(
        behind="if step % 5 == 0:\n    model.eval()\n    with torch.no_grad():\n        model(x)\n    model.train()",
        fits="!modes",
    ),
    # hooks
    "pre hook decays": Piece(
        top="@torch.no_grad()\ndef decay(opt, *_):\n    for group in opt.param_groups:\n"
        "        for p in group['params']:\n            p.mul_(0.99)",
        made="for opt in opts:\n    opt.register_step_pre_hook(decay)",
        fits="!hooks framework",
    ),
    "pre hook scales gradients": Piece(
        top="def halve(opt, *_):\n    for group in opt.param_groups:\n        for p in group['params']:\n"
        "            if p.grad is not None:\n                p.grad.mul_(0.5)",
        attached="for opt in opts:\n    opt.register_step_pre_hook(halve)",
        fits="!hooks",
    ),
    "pre hook sets the rate": Piece(
        top="def slower(opt, *_):\n    opt.param_groups[0]['lr'] = float(opt.param_groups[0]['lr']) * 0.97",
        attached="opts[0].register_step_pre_hook(slower)",
        fits="!hooks !lr !tensor",
    ),
    "post hook clamps": Piece(
        top="def clamp(opt, *_):\n    for group in opt.param_groups:\n        for p in group['params']:\n"
        "            p.data.clamp_(-0.3, 0.3)",
        made="for opt in opts:\n    opt.register_step_post_hook(clamp)",
        fits="linear !hooks framework",
        said="DIFFERENT",
    ),
    "hook on gradients": Piece(made="model.head.weight.register_hook(lambda grad: grad * 0.5)", fits="linear !hooks"),
    "hook on accumulated": Piece(
        made="model.head.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, 'grad', p.grad * 0.5))",
        fits="linear !hooks",
    ),
    "late hook on gradients": Piece(
        made="hooked = []",
        start="if step >= 7 and not hooked:\n"
        "    hooked.append(model.head.bias.register_hook(lambda grad: grad.clamp(-0.1, 0.1)))",
        fits="linear !hooks",
    ),
    "base made later": Piece(
        start="if step == 6:\n    torch.optim.RMSprop(nn.Linear(3, 3).parameters(), lr=0.1)\n"
        "    torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1)",
        fits="!first",
        said="the audit found",  # hooks that change gradients run twice from then on, where a step calls its base's
    ),
    "probe trained": Piece(
        behind=code("""
            if step % 6 == 0:
                probe = nn.Linear(5, 2)
                trainer = torch.optim.Adam(probe.parameters(), lr=0.1)
                probe(torch.randn(4, 5)).sum().backward()
                trainer.step()
        """)
    ),
    "second optimizer unknown": Piece(
        made="model.other = nn.Linear(12, 5)\nmodel.hidden = None",
        start="if step >= 5 and model.hidden is None:\n"
        "    model.hidden = torch.optim.Adam(model.other.parameters(), lr=0.01)",
        loss="F.cross_entropy(model(x) + 0.1 * model.other(x), y)",
        behind="if model.hidden is not None:\n    model.hidden.step()\n    model.hidden.zero_grad()",
        fits="linear !loss !first !copy",
        said="optimizer",
    ),
    # ambient
    "autocast": Piece(
        around="with torch.autocast('cpu', torch.bfloat16):",
        loss="F.cross_entropy(model(x).float(), y)",
        fits="linear !loss !autocast",
    ),
    "forward in autocast": Piece(
        top="def low(model, x):\n    with torch.autocast('cpu', torch.bfloat16):\n        return model(x).float()",
        loss="F.cross_entropy(low(model, x), y)",
        fits="linear !loss !autocast",
    ),
    "flush denormal": Piece(
        top="torch.set_flush_denormal(True)", loss="F.cross_entropy(model(x), y) * 1e-19", fits="!loss"
    ),
    "tiny losses": Piece(loss="F.cross_entropy(model(x), y) * 1e-20", fits="!loss"),
    "default dtype": Piece(top="torch.set_default_dtype(torch.float64)", start="x = x.double()", fits="default"),
    "deterministic": Piece(top="torch.use_deterministic_algorithms(True)"),
    # commits
    "numbered": Piece(commit="session.commit(step=step)", fits="!commit"),
    "every other step committed": Piece(
        commit="if step % 2 == 0:\n    session.commit(step=step)", fits="!commit", said="died before its third commit"
    ),
    "batches left out": Piece(
        start="if step in (2, 19):\n    continue", commit="session.commit(step=step)", fits="!commit"
    ),
    # storage of tensors
    "flat parameters": Piece(
        made=code("""
            flat = torch.cat([p.detach().flatten() for p in model.parameters()])
            for p in model.parameters():
                p.data, flat = flat[: p.numel()].view_as(p), flat[p.numel() :]
        """),
        fits="default !storage",
    ),
    "flat gradients": Piece(
        made=code("""
            flat = torch.zeros(sum(p.numel() for p in model.parameters()))
            starts = [sum(p.numel() for p in [*model.parameters()][:i]) for i in range(len([*model.parameters()]))]
        """),
        start="flat.zero_()\nfor p, begin in zip(model.parameters(), starts):\n"
        "    p.grad = flat[begin : begin + p.numel()].view_as(p)",
        between="flat.mul_(0.5 + 1 / (1 + flat.norm()))",
        fits="default !storage !zero !flags !groups",
    ),
    "transposed weight": Piece(
        made="model.head.weight.data = model.head.weight.data.T.contiguous().T", fits="linear !storage"
    ),
    "weights moved": Piece(
        behind="if step % 4 == 0:\n    model.head.weight.data = model.head.weight.data.clone()", fits="linear !storage"
    ),
    "pruned": Piece(
        start="if step >= 8 and not hasattr(model.head, 'weight_mask'):\n"
        "    torch.nn.utils.prune.l1_unstructured(model.head, 'weight', 0.3)",
        fits="default !storage !hooks !loss !copy",
        said="parameter no longer",
    ),
    "parametrized later": Piece(
        start="if step >= 8 and not hasattr(model.head, 'parametrizations'):\n"
        "    torch.nn.utils.parametrize.register_parametrization(model.head, 'bias', nn.Tanh())",
        fits="default !storage !hooks !loss",
        said="parameter no longer",
    ),
    "parameter outside": _spread(attach="extra_modules={'spread': nn.ParameterList([spread])}"),
    "parameter outside, not named": _spread(refused="extra_modules|parameter"),
    "input optimized": Piece(
        made="shift = torch.zeros(12, requires_grad=True)\nopts[0].add_param_group({'params': [shift]})",
        start="x = x + shift",
        ends="shift=shift",
        fits="default !groups !extra !first !storage",
        refused="extra_modules|parameter",
    ),
    "diverges": Piece(start="if step == 8:\n    x = x * float('nan')", fits="default !finite"),
    "dead units": Piece(
        behind="if step == 5:\n    model.head.weight.data[0] = -0.0", fits="linear !storage", said="DIFFERENT"
    ),
    # more ways of backward
    "module hook on gradients": Piece(
        top="def halved(module, grads, outs):\n    return tuple(g if g is None else 0.5 * g for g in grads)",
        made="model.head.register_full_backward_hook(halved)",
        fits="linear !hooks",
    ),
    "another loss first": Piece(
        start="if model.head.weight.is_leaf and model.head.weight.requires_grad:\n"
        "    extra = model.head.weight.square().mean()\n    extra.backward()\n    model.head.weight.grad.mul_(0.1)",
        fits="linear",
    ),
    "step twice": Piece(behind="if step % 4 == 0:\n    opts[-1].step()", fits="!closure !scaler"),
    "evaluation loader": Piece(
        behind=code("""
            if step % 5 == 0:
                with torch.inference_mode():
                    for held_out in torch.utils.data.DataLoader(torch.zeros(8, 12), batch_size=4, shuffle=True):
                        model(held_out)
        """)
    ),
    "cyclic with momentum": _schedule(
        "schedule = torch.optim.lr_scheduler.CyclicLR(opts[0], 0.001, 0.05, 3, cycle_momentum='momentum' in "
        "opts[0].defaults)",
        fits="!lr !tensor !groups",  # it has the momentum of those that were there
    ),
    "sequence of schedules": _schedule(
        code("""
            kinds = torch.optim.lr_scheduler
            parts = [kinds.LinearLR(opts[0], total_iters=5), kinds.ExponentialLR(opts[0], 0.9)]
            schedule = kinds.SequentialLR(opts[0], parts, [5])
        """)
    ),
    # other losses and objects
    "own generator of the script": Piece(
        made="chance = torch.Generator().manual_seed(2)",
        attached="session.register('chance', chance)",
        start="x = x + 0.1 * torch.randn(x.shape, generator=chance)",
    ),
    "smoothed loss registered": Piece(
        top=code("""
            class Meter:
                value = 1.0
                def state_dict(self):
                    return {"value": self.value}
                def load_state_dict(self, state):
                    self.value = state["value"]
        """),
        made="meter = Meter()",
        attached="session.register('meter', meter)",
        behind="meter.value = 0.9 * meter.value + 0.1 * float(loss)",
        start="x = x * meter.value",
        fits="!finite",
    ),
    "regularized": Piece(
        loss="F.cross_entropy(model(x), y) + 0.01 * sum(p.abs().sum() for p in model.parameters())", fits="dense !loss"
    ),
    "only at times": Piece(
        loss="F.cross_entropy(model(x) if step % 3 else model.head(model.body(x).detach()), y)", fits="split !loss"
    ),
    "gradient dropped behind": Piece(behind="for p in model.body.parameters():\n    p.grad = None"),
    "forward of another batch": Piece(start="with torch.no_grad():\n    model(torch.randn(8, 12))"),
}

#: What the two reports of adversaries contain; one in five programs draws two of these.
REPORTED = (
    "decay before step", "decay through data", "pre hook decays", "clamp between optimizers", "rate from old gradients",
    "late buffer", "target copied", "frozen weight replaced", "still module replaced", "assigned", "decay switched off",
    "nesterov switched on", "pre hook scales gradients", "pre hook sets the rate", "base made later", "groups swap",
    "groups in another order", "one rate tensor", "extra module frozen", "body in eval", "second optimizer unknown",
    "autocast", "flush denormal", "function in a group", "schedule unregistered", "state cleared", "clip norm",
    "noise on gradients", "normalized gradients", "buffer grows",
)  # fmt: skip
