"""Ingredients of generated trainings: small pieces of source text, each with its place in a training loop.

Texts use the names that a rendered program has (:mod:`tests.fuzzing.trainings.programs`): ``model`` with ``body`` and
``head``, ``opts``, ``session``, ``step``, and in the loop ``x``, ``y`` and ``loss``. Nothing stands
behind the commit: a kill before it would rightly leave it out.
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import cleandoc


class _Fitting:
    """What goes with others as the words in `fits` say.

    A plain word is a trait that the model must have. Two with the same word behind "!" are not drawn together. What has
    the word "framework" is used in frameworks' loops, too; a style in Lightning's manual optimization and Accelerate.
    """

    fits: str

    @property
    def wants(self) -> frozenset[str]:
        return frozenset(word for word in self.fits.split() if word[0] != "!" and word != "framework")

    @property
    def clash(self) -> frozenset[str]:
        return frozenset(word[1:] for word in self.fits.split() if word[0] == "!")

    @property
    def framework(self) -> bool:
        return "framework" in self.fits.split()


@dataclass(frozen=True)
class Piece(_Fitting):
    """What one ingredient puts where; in a framework's hooks there is no ``session``, ``x``, ``y`` and ``loss``."""

    top: str = ""  # classes and functions, before ``train()``
    made: str = ""  # behind the optimizers
    attach: str = ""  # further arguments of ``attach``
    attached: str = ""  # behind ``attach``, before ``restore``
    start: str = ""  # at the begin of a step, before gradients are zeroed
    loss: str = ""  # the loss, in place of the usual one
    around: str = ""  # a ``with`` line around backward and step
    between: str = ""  # between backward and the optimizers' steps
    middle: str = ""  # between the first optimizer's step and the next one's
    behind: str = ""  # behind the steps, before the commit
    commit: str = ""  # the commit, in place of the usual one
    ends: str = ""  # further arguments of ``end()``
    fits: str = ""
    #: What a warning has to name where the training may come out differently; "" where it has to be exact.
    said: str = ""
    refused: str = ""  # what an error at the start may say; "" where it has to be protected


@dataclass(frozen=True)
class Model(_Fitting):
    """A kind of model: an expression, and what pieces may rely on."""

    make: str
    top: str = ""
    traits: frozenset[str] = frozenset({"dense", "linear"})
    fits: str = ""
    said: str = ""
    refused: str = ""


@dataclass(frozen=True)
class Opt(_Fitting):
    """An optimizer: an expression of the parameters ``{p}``."""

    make: str
    top: str = ""
    alone: bool = False  # whether it takes all parameters in one group only
    fits: str = "dense"
    styles: frozenset[str] = frozenset()  # the only styles of a step that it goes with; empty: all
    said: str = ""
    refused: str = ""

    @property
    def decays(self) -> bool:
        """Whether its groups take a ``weight_decay``: none does with sparse gradients."""
        return self.make.startswith("torch.") and "fused" not in self.make and "dense" in self.wants


@dataclass(frozen=True)
class Style(_Fitting):
    """How a batch becomes a step; ``{between}``, ``{middle}`` and ``{loss}`` stand for pieces."""

    text: str
    made: str = ""
    attached: str = ""
    points: tuple[str, ...] = ("backward", "between", "stepped")  # where a kill can be, beside those of all programs
    fits: str = ""


@dataclass(frozen=True)
class Frame(_Fitting):
    """What is special about a training in a framework."""

    arguments: str = ""  # of the Trainer, or of the Accelerator
    methods: str = ""  # of the LightningModule
    lines: str = ""  # before the Trainer is made; it may extend ``callbacks``
    made: str = ""  # in ``configure_optimizers()``; it may set ``schedules``
    accumulates: bool = False  # whether not every batch comes to the optimizer's step
    batches: int = 7  # of an epoch, if it has so many
    fits: str = ""
    said: str = ""
    refused: str = ""


@dataclass(frozen=True)
class Data:
    """Where batches come from: lines of each step, or a loader whose batches are steps."""

    step: str = ""
    top: str = ""
    made: str = ""
    loop: str = ""  # iterates over batches inside an epoch; "" where each step draws
    attached: str = ""
    batches: int = 7  # of an epoch
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
