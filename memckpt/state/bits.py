"""Bitwise comparison of tensors: equality, and distance in units in the last place."""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: Elements compared at once; bounds the temporaries, which are doubles.
_CHUNK = 1 << 22
_BIT_VIEW = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether two tensors have one shape, one dtype and the same bits; NaNs with equal bits are equal."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    return torch.equal(_as_bits(ours), _as_bits(theirs))


def _as_bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.contiguous().view(_BIT_VIEW[tensor.element_size()])


def ulp_distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest distance between two tensors of one dtype in units in the last place; 0 only if all bits are equal.

    Values of different sign are counted through zero. Integers count their difference.
    """
    if ours.is_complex():
        ours, theirs = (torch.view_as_real(one.resolve_conj()) for one in (ours, theirs))
    a, b = _as_bits(ours), _as_bits(theirs)
    if torch.equal(a, b):
        return 0.0
    width = ours.element_size()
    if not ours.is_floating_point() or width == 1:
        return float((a.double() - b.double()).abs().max())
    lowest = -(2 ** (8 * width - 1))
    a, b = (torch.where(bits < 0, lowest - bits, bits) for bits in (a, b))
    # Doubles hold differences of 64-bit patterns approximately, which suffices for a magnitude.
    return max(float((a.double() - b.double()).abs().max()), 1.0)


@dataclass
class Distance:
    """Distance between two tensors, or between pieces of them that are added one by one.

    Attributes:
        elements, differing: number of elements, and of those that differ in any bit.
        largest: largest absolute difference of two values; infinite if shapes, dtypes or NaNs differ.
        scale: largest absolute value of the expected tensor.
        ulp: largest difference in units in the last place.
    """

    elements: int = 0
    differing: int = 0
    largest: float = 0.0
    scale: float = 0.0
    ulp: float = 0.0

    def add(self, found: torch.Tensor, held: torch.Tensor) -> None:
        """Compare one more pair, found and expected, on any devices; the comparison runs on the device of `found`."""
        self.elements += held.numel()
        if found.shape != held.shape or found.dtype != held.dtype:
            self.differing += max(held.numel(), 1)
            self.largest = self.ulp = float("inf")
            return
        ours, theirs = found.reshape(-1), held.reshape(-1)
        for start in range(0, held.numel(), _CHUNK):
            self._add(ours[start : start + _CHUNK], theirs[start : start + _CHUNK].to(found.device))

    def _add(self, found: torch.Tensor, held: torch.Tensor) -> None:
        self.scale = max(self.scale, _largest(held))
        if same_bits(found, held):
            return
        self.differing += int((_as_bits(found) != _as_bits(held)).view(found.numel(), -1).any(1).sum())
        self.ulp = max(self.ulp, ulp_distance(found, held))
        self.largest = max(self.largest, _largest_difference(found, held))

    @property
    def relative(self) -> float:
        """The largest difference as a fraction of the largest expected value."""
        if not self.differing:
            return 0.0
        return self.largest / self.scale if self.scale else float("inf")

    @property
    def text(self) -> str:
        """The distance as text."""
        return (
            f"{self.differing} of {self.elements} elements differ, by {self.ulp:.3g} ulp and {self.relative:.2g} of "
            "the largest value at most"
        )


def _largest(tensor: torch.Tensor) -> float:
    values = tensor.double() if not tensor.is_complex() else tensor.to(torch.complex128)
    return float(torch.nan_to_num(values.abs(), nan=0.0, posinf=0.0).max())


def _largest_difference(found: torch.Tensor, held: torch.Tensor) -> float:
    wide = torch.complex128 if found.is_complex() else torch.float64
    difference = (found.to(wide) - held.to(wide)).abs()
    # Equal infinities give NaN, and so do NaNs; neither is a difference if the bits are equal.
    difference = torch.where((found == held) | (found.isnan() & held.isnan()), 0.0, difference)
    return float(torch.nan_to_num(difference, nan=float("inf")).max())
