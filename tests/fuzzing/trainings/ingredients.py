"""Ingredients of generated trainings: small pieces of source text, each with its place in a training loop.

Texts use the names that a rendered program has (:mod:`tests.fuzzing.trainings.programs`): ``model`` with ``body`` and
``head``, ``opts``, ``session``, ``step``, and in the loop ``x``, ``y`` and ``loss``. Nothing stands
behind the commit: a kill before it would rightly leave it out.
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import cleandoc


@dataclass(frozen=True)
class Piece:
    """What one ingredient puts where.

    Attributes:
        top: classes and functions, before ``train()``.
        made: behind the optimizers.
        attach: further arguments of ``attach``.
        attached: behind ``attach``, before ``restore``.
        start: at the begin of a step, before gradients are zeroed.
        loss: the loss, in place of the usual one.
        around: a ``with`` line around backward and step.
        between: between backward and the optimizers' steps.
        middle: between the first optimizer's step and the next one's.
        behind: behind the steps, before the commit.
        commit: the commit, in place of the usual one.
        ends: further arguments of ``end()``.
        wants: traits that the model must have.
        clash: two pieces with a word in common are not drawn together.
        said: what a warning has to name where the training may come out differently; "" where it has to be exact.
        refused: what an error at the start may say; "" where it has to be protected.
        framework: whether it is used in hooks of frameworks, too. It needs none of ``session``, ``x``, ``y``, ``loss``.
    """

    top: str = ""
    made: str = ""
    attach: str = ""
    attached: str = ""
    start: str = ""
    loss: str = ""
    around: str = ""
    between: str = ""
    middle: str = ""
    behind: str = ""
    commit: str = ""
    ends: str = ""
    wants: frozenset[str] = frozenset()
    clash: frozenset[str] = frozenset()
    said: str = ""
    refused: str = ""
    framework: bool = False


@dataclass(frozen=True)
class Model:
    """A kind of model: an expression, and what pieces may rely on, or not go with."""

    make: str
    top: str = ""
    traits: frozenset[str] = frozenset({"dense", "linear"})
    clash: frozenset[str] = frozenset()
    said: str = ""
    refused: str = ""


@dataclass(frozen=True)
class Opt:
    """An optimizer: an expression of the parameters ``{p}``.

    Attributes:
        alone: whether it takes all parameters in one group only.
        wants: traits that the model must have.
        styles: the only styles of a step that it goes with; empty: all.
    """

    make: str
    top: str = ""
    alone: bool = False
    wants: frozenset[str] = frozenset({"dense"})
    styles: frozenset[str] = frozenset()
    said: str = ""
    refused: str = ""

    @property
    def decays(self) -> bool:
        """Whether its groups take a ``weight_decay``: none does with sparse gradients."""
        return self.make.startswith("torch.") and "fused" not in self.make and "dense" in self.wants


@dataclass(frozen=True)
class Style:
    """How a batch becomes a step; ``{between}``, ``{middle}`` and ``{loss}`` stand for pieces.

    Attributes:
        points: where a kill can be, beside those of all programs.
        anywhere: whether it goes with Lightning's manual optimization and Accelerate, too.
    """

    text: str
    made: str = ""
    attached: str = ""
    points: tuple[str, ...] = ("backward", "between", "stepped")
    wants: frozenset[str] = frozenset()
    clash: frozenset[str] = frozenset()
    anywhere: bool = False


@dataclass(frozen=True)
class Frame:
    """What is special about a training in a framework.

    Attributes:
        arguments: of the Trainer, or of the Accelerator.
        methods: of the LightningModule.
        lines: before the Trainer is made; it may extend ``callbacks``.
        made: in ``configure_optimizers()``; it may set ``schedules``.
        accumulates: whether not every batch comes to the optimizer's step.
        batches: of an epoch, if it has so many.
    """

    arguments: str = ""
    methods: str = ""
    lines: str = ""
    made: str = ""
    accumulates: bool = False
    batches: int = 7
    clash: frozenset[str] = frozenset()
    said: str = ""
    refused: str = ""


@dataclass(frozen=True)
class Data:
    """Where batches come from: lines of each step, or a loader whose batches are steps.

    Attributes:
        loop: iterates over batches inside an epoch; "" where each step draws.
        batches: of an epoch.
    """

    step: str = ""
    top: str = ""
    made: str = ""
    loop: str = ""
    attached: str = ""
    batches: int = 7
    said: str = ""
    refused: str = ""
    before: str = ""


def code(text: str) -> str:
    """Source text without its indentation."""
    return cleandoc(text)


DENSE = frozenset({"dense"})
LINEAR = frozenset({"linear"})
#: Of a ``Net`` whose body and head can be called one by one, and differentiated twice, in any dtype.
SIMPLE = frozenset({"dense", "linear", "split", "twice", "default"})
