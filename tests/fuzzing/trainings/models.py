"""Kinds of models."""

from __future__ import annotations

from textwrap import indent
from typing import Any

from tests.fuzzing.trainings.ingredients import DENSE, LINEAR, SIMPLE, Model, code


def _own(name: str, forward: str, init: str = "", base: str = "nn.Module", make: str = "", **more: Any) -> Model:
    """A model of a class that a user writes: the bodies of its methods, and how one is made."""
    parts = ", body, head" if base == "Net" else ""
    lines = [f"class {name}({base}):"]
    if init:
        lines += [f"    def __init__(self{parts}):", f"        super().__init__({parts[2:]})"]
        lines.append(indent(code(init), " " * 8))
    lines += ["    def forward(self, x):", indent(code(forward), " " * 8)]
    return Model(f"{name}({make})", "\n".join(lines), **more)


def _net(name: str, forward: str, init: str = "", **more: Any) -> Model:
    """A class around a body and a head."""
    return _own(name, forward, init, "Net", **{"make": "nn.Linear(12, 20), nn.Linear(20, 5)", **more})


MODELS: dict[str, Model] = {
    "mlp": Model("Net(nn.Sequential(nn.Linear(12, 20), nn.ReLU()), nn.Linear(20, 5))", traits=SIMPLE),
    "wide": Model("Net(nn.Sequential(nn.Linear(12, 900), nn.Tanh()), nn.Linear(900, 5))", traits=SIMPLE),
    "wider": Model("Net(nn.Sequential(nn.Linear(12, 1200), nn.Tanh()), nn.Linear(1200, 5))", traits=SIMPLE),
    "batch norm and dropout": Model(
        "Net(nn.Sequential(nn.Linear(12, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Dropout(0.2)), nn.Linear(20, 5))",
        traits=SIMPLE,
    ),
    "cumulative batch norm": Model(
        "Net(nn.Sequential(nn.Linear(12, 20), nn.BatchNorm1d(20, momentum=None), nn.ReLU()), nn.Linear(20, 5))",
        traits=SIMPLE,
    ),
    "convolution": Model(
        "Net(nn.Sequential(nn.Unflatten(1, (1, 12)), nn.Conv1d(1, 6, 3), nn.GroupNorm(2, 6), nn.GELU(), nn.Flatten()), "
        "nn.Linear(60, 5))",
        traits=SIMPLE,
    ),
    "channels last": Model(
        "Net(nn.Sequential(nn.Unflatten(1, (2, 2, 3)), nn.Conv2d(2, 6, 2), nn.ReLU(), nn.Flatten()), nn.Linear(12, 5))"
        ".to(memory_format=torch.channels_last)"
    ),
    "spectral norm": Model(
        "Net(nn.Sequential(torch.nn.utils.parametrizations.spectral_norm(nn.Linear(12, 20)), nn.Tanh()), "
        "nn.Linear(20, 5))"
    ),
    "weight norm": Model(
        "Net(nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(12, 20)), nn.Tanh()), "
        "nn.Linear(20, 5))",
        traits=SIMPLE,
        fits="!copy",  # a copy lists its parameters in another order
    ),
    "orthogonal": Model(
        "Net(nn.Sequential(torch.nn.utils.parametrizations.orthogonal(nn.Linear(12, 12)), nn.Tanh()), nn.Linear(12, 5))"
    ),
    "float64": _net(
        "Double",
        "return super().forward(x.double()).float()",
        make="nn.Sequential(nn.Linear(12, 20), nn.Tanh()).double(), nn.Linear(20, 5).double()",
    ),
    "tied": _own(
        "Tied",
        "return self.head(F.linear(torch.tanh(self.body(x)), self.again.T))",
        """
            self.body, self.head = nn.Linear(12, 12), nn.Linear(12, 5)
            self.again = self.body.weight
        """,
    ),
    "attention": _own(
        "Attending",
        "return self.head(self.body(x.view(-1, 3, 4)).flatten(1))",
        """
            self.body = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
            self.head = nn.Linear(12, 5)
        """,
    ),
    "recurrent": _own(
        "Recurrent",
        """
            with torch.autocast("cpu", enabled=False):  # not every CPU has such layers in bfloat16
                out = self.body(x.float().view(-1, 3, 4))[0]
            return self.head(out.flatten(1))
        """,
        "self.body, self.head = nn.LSTM(4, 6, 2, dropout=0.1, batch_first=True), nn.Linear(18, 5)",
    ),
    "checkpointed": _net(
        "Checkpointed",
        "return self.head(torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=False))",
        make="nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Dropout(0.1)), nn.Linear(20, 5)",
    ),
    "sparse embedding": _own(
        "Rows",
        "return self.head(self.body((x * 20).long().abs() % 60).flatten(1))",
        "self.body, self.head = nn.Embedding(60, 6, sparse=True), nn.Linear(72, 5)",
        traits=LINEAR,
    ),
    "embedding of bounded norm": _own(
        "Bounded",
        "return self.head(self.body((x * 20).long().abs() % 60).flatten(1))",
        "self.body, self.head = nn.Embedding(60, 6, max_norm=1.0), nn.Linear(72, 5)",
    ),
    "scalar of bfloat16": _own(
        "Scaled",
        "return self.head(self.body(x)) * self.scale",
        """
            self.body, self.head = nn.Linear(12, 20), nn.Linear(20, 5)
            self.scale = nn.Parameter(torch.tensor(1.3, dtype=torch.bfloat16))
        """,
    ),
    "scalar beside float64": _own(
        "Mixed",
        "return self.head(self.body(x).double()).float() * self.scale",
        """
            self.body, self.head = nn.Linear(12, 20), nn.Linear(20, 5).double()
            self.scale = nn.Parameter(torch.tensor(1.3))
        """,
        traits=DENSE,
    ),
    "bfloat16": _net(
        "Low",
        "return super().forward(x.bfloat16()).float()",
        make="nn.Sequential(nn.Linear(12, 20), nn.ReLU()).bfloat16(), nn.Linear(20, 5).bfloat16()",
        traits=DENSE,
    ),
    "complex": _own(
        "Waves",
        "return self.head(self.body(x.to(torch.complex64)).abs())",
        """
            self.body = nn.Linear(12, 20, dtype=torch.complex64)
            self.head = nn.Linear(20, 5)
        """,
        traits=LINEAR,
    ),
    "extra state": Model(
        "Annealed(nn.Sequential(nn.Linear(12, 20), nn.ReLU()), nn.Linear(20, 5))",
        code("""
            class Annealed(Net):
                level = 1.0
                def get_extra_state(self):
                    return {"level": self.level}
                def set_extra_state(self, state):
                    self.level = state["level"]
                def forward(self, x):
                    self.level *= 0.97
                    return super().forward(x) * self.level
        """),
    ),
    "late mask": _net(
        "Masked",
        """
            if self.mask is None:
                self.register_buffer("mask", torch.ones(20, 12).tril() > 0, persistent=False)
            return self.head(F.linear(x, self.body.weight * self.mask, self.body.bias))
        """,
        'self.register_buffer("mask", None, persistent=False)',
        fits="!copy",  # an average of flags
    ),
    "growing cache": _net(
        "Growing",
        """
            self.calls += 1
            if self.training and 3 + self.calls // 4 > len(self.cache):
                self.cache = torch.linspace(0.5, 1, 3 + int(self.calls) // 4)
            return super().forward(x) * self.cache.mean()
        """,
        """
            self.register_buffer("cache", torch.ones(4), persistent=False)
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        """,
        fits="!copy",  # an average of tensors that grow
    ),
    "running codebook": _net(
        "Codes",
        """
            h = self.body(x)
            if self.training:
                nearest = torch.cdist(h.detach(), self.codes).argmin(1)
                self.codes = self.codes.index_add(0, nearest, 0.1 * (h.detach() - self.codes[nearest]))
            return self.head(h + (h - self.codes[0]).relu())
        """,
        'self.register_buffer("codes", torch.linspace(-1, 1, 8 * 20).view(8, 20))',
    ),
    "generator of the module": _net(
        "Noisy",
        "return super().forward(x + 0.1 * torch.randn(x.shape, generator=self.noise))",
        "self.noise = torch.Generator().manual_seed(5)",
        said="generator",
    ),
    "observer of quantization": _net(
        "Observed",
        """
            self.observer(self.body.weight.detach())
            return super().forward(x) * (1 + self.observer.max_val.mean())
        """,
        "self.observer = torch.ao.quantization.PerChannelMinMaxObserver()",
        fits="!copy",
    ),
    "lists of parameters": _own(
        "Listed",
        "return self.head(torch.tanh(x @ self.body[0] + self.body[1]))",
        """
            self.body = nn.ParameterList([torch.randn(12, 20) * 0.1, torch.zeros(20)])
            self.head = nn.Linear(20, 5)
            self.unused = nn.Parameter(torch.ones(3))
        """,
    ),
    "empty and unused": _net(
        "Odd",
        "return self.head(self.body(x) * self.constant)",
        """
            self.empty, self.unused = nn.Parameter(torch.zeros(0, 4)), nn.Linear(3, 3)
            self.constant = nn.Parameter(torch.ones(20), requires_grad=False)
        """,
    ),
    "sometimes a branch": _net(
        "Branching",
        """
            out = super().forward(x)
            return out + self.branch(x) if random.random() < 0.5 else out
        """,
        "self.branch = nn.Linear(12, 5)",
    ),
    "odd buffers": _net(
        "Buffered",
        """
            if self.training:
                self.kind0.logical_not_()
                self.kind1 += 1
                self.kind2 += 100
                self.kind3 += 0.1
                self.kind4 = self.kind4 * 1j + 1
            out = super().forward(x) + self.view.mean()
            return out * (1 + self.kind3.float().mean()) + self.kind4.real.mean() + self.kind0.float().mean()
        """,
        """
            kinds = [torch.bool, torch.int64, torch.uint8, torch.float16, torch.complex64]
            for number, kind in enumerate(kinds):
                self.register_buffer(f"kind{number}", torch.zeros(3, dtype=kind))
            self.register_buffer("nothing", torch.zeros(0))
            self.register_buffer("view", self.head.weight.detach()[0])
        """,
        fits="!copy",
    ),
    "expanded buffer": _net(
        "Expanded",
        "return super().forward(x * self.spread[:1])",
        'self.register_buffer("spread", torch.linspace(0.5, 1, 12).expand(8, 12))',
        fits="!copy",
    ),
    "sparse buffer": _net(
        "Graph",
        "return super().forward(torch.sparse.mm(self.edges, x.T).T)",
        'self.register_buffer("edges", torch.eye(12).to_sparse())',
        said="sparse|edges",
        refused="sparse|edges",
    ),
    "buffer of another kind": _net(
        "Changing",
        """
            self.seen = self.seen + 1 if self.seen < 8 else self.seen.double() * 1.01
            return super().forward(x) * (1 + 0.01 * float(self.seen))
        """,
        'self.register_buffer("seen", torch.zeros(1, dtype=torch.int32))',
    ),
    "module twice": _own(
        "Twice",
        """
            for layer in self.layers:
                x = layer(x)
            self.mean.lerp_(x.detach().mean(0).to(self.mean), 0.1)
            return self.head(x - self.layers[1].again)
        """,
        """
            self.body, self.head = nn.Linear(12, 12), nn.Linear(12, 5)
            self.layers = nn.ModuleList([self.body, nn.Tanh(), self.body])
            self.register_buffer("mean", torch.zeros(12))
            self.layers[1].register_buffer("again", self.mean)
        """,
    ),
}
