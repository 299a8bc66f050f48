"""Optimizers, torch's and such as users write, and how they share the parameters."""

from __future__ import annotations

from textwrap import indent
from typing import Any

from tests.fuzzing.trainings.ingredients import Opt, code


def _each(
    name: str,
    body: str,
    *,
    lr: float = 0.05,
    settings: str = "",
    init: str = "",
    start: str = "",
    group: str = "",
    after: str = "",
    top: str = "",
    **more: Any,
) -> Opt:
    """An optimizer whose step does `body` for each parameter with a gradient.

    `start` comes before the groups, `group` and `after` around the parameters of each, `top` before the class.
    """

    def lines(text: str, depth: int) -> str:
        return indent(code(text) + "\n", " " * depth) if text else ""

    text = (
        f"{lines(top, 0)}\n\n" * bool(top)
        + f"class {name}(torch.optim.Optimizer):\n"
        + f"    def __init__(self, params, lr={lr}):\n"
        + f"        super().__init__(params, dict(lr=lr{settings}))\n"
        + lines(init, 8)
        + "    @torch.no_grad()\n    def step(self, closure=None):\n"
        + lines(start, 8)
        + "        for group in self.param_groups:\n"
        + lines(group, 12)
        + '            for p in group["params"]:\n                if p.grad is not None:\n'
        + lines(body, 20)
        + lines(after, 12)
    )
    return _own(f"{name}({{p}})", "\n" + text, **more)


def _own(call: str, text: str, **more: Any) -> Opt:
    text = code(text)
    if "return" not in text:  # its step is the last method
        head = "def step(self, closure=None):\n"
        text = text.replace(head, f"{head}        loss = closure and torch.enable_grad()(closure)()\n")
        text += "\n        return loss"
    return Opt(call, text, **more)


OPTIMIZERS: dict[str, Opt] = {
    "sgd": Opt("torch.optim.SGD({p}, lr=0.05)", fits=""),
    "sgd momentum": Opt("torch.optim.SGD({p}, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01)"),
    "sgd nesterov foreach": Opt("torch.optim.SGD({p}, lr=0.05, momentum=0.9, nesterov=True, foreach=True)"),
    "sgd nesterov decay": Opt(
        "torch.optim.SGD({p}, lr=0.05, momentum=0.9, nesterov=True, foreach=True, weight_decay=0.01)"
    ),
    "sgd fused": Opt("torch.optim.SGD({p}, lr=0.05, momentum=0.9, fused=True)", refused="fused SGD"),
    "sgd maximize": Opt("torch.optim.SGD({p}, lr=0.01, maximize=True)"),
    "sgd of its own name": Opt(
        "SGD({p}, lr=0.05, momentum=0.9)",
        code("""
            class SGD(torch.optim.SGD):
                @torch.no_grad()
                def step(self, closure=None):
                    found = super().step(closure)
                    for group in self.param_groups:
                        for p in group["params"]:
                            if p.grad is not None:
                                p.sub_(self.state[p]["momentum_buffer"], alpha=0.1 * group["lr"])
                    return found
        """),
    ),
    "adam": Opt("torch.optim.Adam({p}, lr=0.01, weight_decay=0.01)"),
    "adam of a tensor": Opt("torch.optim.Adam({p}, lr=torch.tensor(0.01), foreach=False)"),
    "adam small": Opt("torch.optim.Adam({p}, lr=0.001, eps=1e-30)"),
    "adamw": Opt("torch.optim.AdamW({p}, lr=0.01)"),
    "adamw foreach": Opt("torch.optim.AdamW({p}, lr=0.01, foreach=True)"),
    "adamw fused": Opt("torch.optim.AdamW({p}, lr=0.01, fused=True)"),
    "adamw amsgrad": Opt("torch.optim.AdamW({p}, lr=0.01, amsgrad=True, maximize=True)"),
    "adagrad": Opt("torch.optim.Adagrad({p}, lr=0.05, lr_decay=0.01)"),
    "adagrad foreach": Opt("torch.optim.Adagrad({p}, lr=0.05, foreach=True)"),
    "adagrad sparse": Opt("torch.optim.Adagrad({p}, lr=0.05)", fits=""),
    "rmsprop": Opt("torch.optim.RMSprop({p}, lr=0.005, centered=True, momentum=0.5)"),
    "rmsprop foreach": Opt("torch.optim.RMSprop({p}, lr=0.005, foreach=True, maximize=True, weight_decay=0.01)"),
    "nadam": Opt("torch.optim.NAdam({p}, lr=0.01, foreach=True, weight_decay=0.01)"),
    "radam": Opt("torch.optim.RAdam({p}, lr=0.01, weight_decay=0.01)"),
    "radam foreach": Opt("torch.optim.RAdam({p}, lr=0.01, foreach=True)"),
    "adadelta": Opt("torch.optim.Adadelta({p})"),
    "adadelta foreach": Opt("torch.optim.Adadelta({p}, foreach=True)"),
    "adamax": Opt("torch.optim.Adamax({p}, lr=0.01, foreach=True)"),
    "asgd": Opt("torch.optim.ASGD({p}, lr=0.05, t0=5.0)"),
    "asgd foreach": Opt("torch.optim.ASGD({p}, lr=0.05, t0=5.0, foreach=True)"),
    "rprop": Opt("torch.optim.Rprop({p}, lr=0.005)"),
    "adafactor": Opt("torch.optim.Adafactor({p}, lr=0.05)", fits="dense linear"),
    "adafactor foreach": Opt("torch.optim.Adafactor({p}, lr=0.05, foreach=True)", fits="dense linear"),
    "lbfgs": Opt("torch.optim.LBFGS({p}, lr=0.1, max_iter=3)", alone=True, styles=frozenset({"closure"})),
    "rebinding": _own(
        "Rebinding({p})",
        """
            class Rebinding(torch.optim.Optimizer):
                def __init__(self, params, lr=0.05):
                    super().__init__(params, dict(lr=lr))
                def step(self, closure=None):
                    for group in self.param_groups:
                        for p in group["params"]:
                            if p.grad is not None:
                                p.data = p.data - group["lr"] * p.grad.data
        """,
    ),
    "counter in groups": _each(
        "EveryK",
        """
            state = self.state[p]
            if "slow" not in state:
                state["slow"] = p.clone()
            p.add_(p.grad, alpha=-group["lr"])
            if group["count"] % group["k"] == 0:
                p.copy_(state["slow"].lerp_(p, 0.5))
        """,
        settings=", k=6, count=0",
        group='group["count"] += 1',
    ),
    "shared state": _each(
        "SharedStep",
        """
            state = self.state[p]
            if not state:
                state["step"], state["m"] = self.t, torch.zeros_like(p)
            state["m"].mul_(0.9).add_(p.grad)
            rate = group["lr"] / state["step"].item() ** 0.5
            p.add_(state["m"] + 0.001 * torch.randn_like(p), alpha=-rate)
        """,
        init="self.t = torch.zeros(())",
        start="self.t += 1",
    ),
    "calls its base": _own(
        "Mine({p}, lr=0.005, momentum=0.9)",
        """
            class Mine(torch.optim.RMSprop):
                def step(self, closure=None):
                    for group in self.param_groups:
                        group.setdefault("seen", 0)
                    return super().step(closure)
        """,
    ),
    "late phase": _each(
        "LatePhase",
        """
            state = self.state[p]
            state["n"] = state.get("n", 0) + 1
            if state["n"] > 5:
                p.grad.div_(p.grad.norm() + 1e-3)
            p.sub_(p.grad, alpha=group["lr"])
        """,
    ),
    "late estimate": _each(
        "LateEstimate",
        'p.sub_(p.grad, alpha=group["lr"] / (0.5 + group["d"]))',
        settings=", n=0, d=1.0",
        group="""
            group["n"] += 1
            grads = [p.grad for p in group["params"] if p.grad is not None]
            if group["n"] > 7:
                group["d"] = 0.9 * group["d"] + 0.1 * sum(float(grad.norm()) for grad in grads)
        """,
        said="DIFFERENT",
    ),
    "hidden attribute": _each(
        "Hidden", 'p.sub_(p.grad, alpha=group["lr"] / self.steps**0.5)', init="self.steps = 0", start="self.steps += 1"
    ),
    "changes gradients": _each(
        "Normalizing",
        """
            p.grad.sub_(p.grad.mean())
            m = self.state[p].setdefault("m", torch.zeros_like(p))
            p.sub_(m.lerp_(p.grad.sign_(), 0.1), alpha=group["lr"])
        """,
        lr=0.02,
    ),
    "norm of all": _each(
        "NormOfAll",
        'p.sub_(p.grad / (1 + norm), alpha=group["lr"])',
        start="""
            every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            norm = sum(p.grad.norm() ** 2 for p in every) ** 0.5
        """,
    ),
    "keyed by id": _each(
        "ById",
        """
            m = self.moments.setdefault(id(p), torch.zeros_like(p))
            p.sub_(m.mul_(0.9).add_(p.grad), alpha=group["lr"])
        """,
        init="self.moments = {}",
    ),
    "eigenbasis": _each(
        "Basis",
        """
            state, grad = self.state[p], p.grad.float().reshape(-1, p.shape[-1] if p.ndim else 1)
            if not state:
                state["n"], state["m"] = 0, torch.zeros(grad.shape[1], grad.shape[1])
            state["m"].lerp_((grad.T @ grad).to(state["m"]), 0.2)
            if state["n"] % 4 == 0:
                state["q"] = torch.linalg.eigh(state["m"] + 1e-6 * torch.eye(len(state["m"])))[1]
            state["n"] += 1
            turned = grad @ state["q"]
            p.sub_((turned / (1e-3 + turned.abs()) @ state["q"].T).view(p.shape), alpha=group["lr"])
        """,
        lr=0.02,
        fits="dense linear",
    ),
    "object in state": _each(
        "Projected",
        """
            state = self.state[p]
            if "projector" not in state:
                state["projector"] = Projector(p)
            change = torch.empty_like(p)
            state["projector"](p.grad, change)
            p.sub_(change, alpha=group["lr"])
        """,
        top="""
            class Projector:
                def __init__(self, like):
                    self.scale = torch.ones_like(like)
                def __call__(self, grad, out):
                    self.scale.mul_(0.98)
                    out.copy_(grad * self.scale)
        """,
        said="state",
        refused="state",
    ),
    "function of its own": _each(
        "Shifted",
        """
            state = self.state[p]
            old = state.setdefault("old", [])
            old.append(p.grad.clone())
            if len(old) > 8:
                p.sub_(p.grad / (self.reduce(old.pop(0)) + 0.1), alpha=group["lr"])
        """,
        init="self.reduce = lambda grad: grad.abs().mean()",
    ),
    "draws": _each("Langevin", 'p.sub_(p.grad + 0.01 * torch.randn_like(p), alpha=group["lr"])'),
    "lookahead around another": _own(
        "Lookahead(torch.optim.SGD({p}, lr=0.05))",
        """
            import collections

            class Lookahead(torch.optim.Optimizer):
                def __init__(self, base, k=4):
                    self.base, self.k, self.count = base, k, 0
                    self.defaults, self.state, self.param_groups = base.defaults, base.state, base.param_groups
                    torch.optim.Optimizer._patch_step_function(self)
                    hooks = collections.OrderedDict
                    self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = hooks(), hooks()
                    self._optimizer_load_state_dict_pre_hooks = hooks()
                    self._optimizer_load_state_dict_post_hooks = hooks()
                    self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]
                def zero_grad(self, set_to_none=True):
                    self.base.zero_grad(set_to_none)
                def state_dict(self):
                    return {"base": self.base.state_dict(), "slow": self.slow, "count": self.count}
                def load_state_dict(self, state):
                    self.base.load_state_dict(state["base"])
                    self.state, self.param_groups = self.base.state, self.base.param_groups
                    self.slow, self.count = state["slow"], state["count"]
                @torch.no_grad()
                def step(self, closure=None):
                    loss = self.base.step(closure)
                    self.count += 1
                    if self.count % self.k == 0:
                        for slow, group in zip(self.slow, self.param_groups):
                            for s, p in zip(slow, group["params"]):
                                p.copy_(s.lerp_(p, 0.5))
                    return loss
        """,
    ),
    "schedule free": _own(
        "ScheduleFree({p})",
        """
            class ScheduleFree(torch.optim.Optimizer):
                def __init__(self, params, lr=0.05):
                    super().__init__(params, dict(lr=lr, k=0, train=True))
                @torch.no_grad()
                def swap(self, train):
                    for group in self.param_groups:
                        if group["train"] != train:
                            group["train"] = train
                            for p in group["params"]:
                                if "z" in self.state[p]:
                                    p.lerp_(self.state[p]["z"], 1 - 1 / 0.9 if not train else 0.1)
                @torch.no_grad()
                def step(self, closure=None):
                    for group in self.param_groups:
                        group["k"] += 1
                        for p in group["params"]:
                            if p.grad is not None:
                                z = self.state[p].setdefault("z", p.clone())
                                p.lerp_(z, 1 / group["k"]).sub_(p.grad, alpha=group["lr"] * (0.9 - 0.9 / group["k"]))
                                z.sub_(p.grad, alpha=group["lr"])
        """,
    ),
    "values in state": _each(
        "Plainly",
        """
            state = self.state[p]
            state["count"] = state.get("count", 0) + 1
            state.setdefault("norms", []).append(float(p.grad.norm()))
            del state["norms"][:-3]
            state["history"] = [p.grad.clone(), *state.get("history", [])][:2]
            p.sub_(sum(state["history"]) / (1 + max(state["norms"])), alpha=group["lr"])
        """,
    ),
    "state on the parameter": _each(
        "OnParameter",
        """
            p.velocity = 0.9 * getattr(p, "velocity", torch.zeros_like(p)) + p.grad
            p.sub_(p.velocity, alpha=group["lr"])
        """,
        said="velocity|attribute",
    ),
    "weight decay schedule": _each(
        "Decaying",
        'p.mul_(1 - group["lr"] * group["decay"]).sub_(p.grad.sign(), alpha=0.1 * group["lr"])',
        settings=", decay=0.1",
        after='group["decay"] *= 0.8',
    ),
}

#: How parameters are shared out: code that makes ``opts`` from the optimizers' expressions ``{a}`` and ``{b}``.
SHARES: dict[str, tuple[str, ...]] = {
    "one": ("[*model.parameters()]",),
    "two groups": ("[{'params': [*model.body.parameters()]}, {'params': [*model.head.parameters()], 'lr': 0.02}]",),
    "decayed and not": (
        (
            "[{'params': [p for p in model.parameters() if p.ndim > 1], 'weight_decay': 0.02}, "
            "{'params': [p for p in model.parameters() if p.ndim < 2], 'weight_decay': 0.0}]"
        ),
    ),
    "each by itself": ("[{'params': [p], 'lr': 0.01 + 0.002 * i} for i, p in enumerate(model.parameters())]",),
    "named": ("[*model.named_parameters()]",),
    "head only": ("[*model.head.parameters()]",),
    "two optimizers": ("[*model.body.parameters()]", "[*model.head.parameters()]"),
    "both step all": ("[*model.parameters()]", "[*model.parameters()]"),
}
