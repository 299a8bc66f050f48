"""The erasure code: a stripe of bytes to k + m - 1 fragments, any k of which give it back.

The fragments are the bytes alone. What liberasurecode puts in front of each is a function of the stripe's length, and
is made anew to decode: it has lengths that the library trusts, and a fragment may come from a peer that lies.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from memckpt.errors import ConfigurationError

if TYPE_CHECKING:
    from pyeclib.ec_iface import ECDriver

#: Bytes of a fragment.
Payload = bytes | memoryview

#: Bytes of a stripe: encoding one works in a core's cache.
STRIPE_BYTES = 256 << 10

#: Any k fragments suffice by their construction. What else there is must show it, with each choice of k.
_PROVEN = frozenset({"isa_l_rs_cauchy", "isa_l_rs_vand_inv", "liberasurecode_rs_vand"})
_MOST_CHOICES = 5_000

_HEADER_BYTES = 80  # of liberasurecode, before each fragment
_MOST_HEADERS = 64  # lengths for which they are kept: whole stripes, and the last ones of some records


class Code:
    """A stripe's bytes to fragments and back. Owns what its backend holds; pyeclib is imported only where it is needed.

    With m = 1 there is no parity, with k = 1 the fragments are copies; both need no backend.

    Args:
        data: k, the number of fragments that make a stripe whole.
        tolerate: m; one fragment less than m can be missing.
        backend: backend of liberasurecode, as pyeclib names it.

    Attributes:
        fragments: number of fragments, k + m - 1.

    Raises:
        ConfigurationError: the backend is not there, does not take so many fragments, or not any k of them suffice.
    """

    def __init__(self, data: int, tolerate: int, backend: str = "isa_l_rs_cauchy") -> None:
        if data < 1 or tolerate < 1:
            raise ConfigurationError(f"peers: expected k and m of 1 or more, found k={data}, m={tolerate}")
        self.data = data
        self.tolerate = tolerate
        self.fragments = data + tolerate - 1
        self._driver: ECDriver | None = None
        self._readable: Callable[[Payload], Any] = _as_array
        self._headers: dict[int, list[bytes]] = {}
        if data > 1 and tolerate > 1:
            self._driver = _open_driver(data, tolerate - 1, backend)
            try:
                self._prove(backend)
            except BaseException:  # nobody else could close it
                self.close()
                raise

    def close(self) -> None:
        """Release what the backend holds. Idempotent."""
        if self._driver is not None:
            self._driver.close()

    def encode(self, stripe: bytes | memoryview) -> Sequence[Payload]:
        """The fragments of a stripe of one byte or more, all of one length; the first k are its bytes in order.

        The stripe is not to change meanwhile; the fragments are the caller's.
        """
        if self._driver is not None:
            return [memoryview(framed)[_HEADER_BYTES:] for framed in self._driver.encode(self._readable(stripe))]
        if self.data == 1:
            return [bytes(stripe)] * self.fragments
        size = self.fragment_bytes(len(stripe))
        return [bytes(stripe[at * size : (at + 1) * size]).ljust(size, b"\0") for at in range(self.data)]

    def decode(self, fragments: Mapping[int, Payload], length: int) -> bytes:
        """The stripe of `length` bytes, from any k of its fragments by their numbers.

        Whether they are right is for the caller to check: wrong ones give wrong bytes.

        Raises:
            ValueError: there are fewer than k, or one has another length than `length` gives it.
        """
        size = self.fragment_bytes(length)
        fit = all(0 <= number < self.fragments and len(fragment) == size for number, fragment in fragments.items())
        if not fit or len(fragments) < self.data:
            found = {number: len(fragment) for number, fragment in sorted(fragments.items())}
            raise ValueError(f"expected {self.data} of {self.fragments} fragments of {size} bytes, found {found}")
        if all(number in fragments for number in range(self.data)):
            return b"".join(fragments[number] for number in range(self.data))[:length]
        if self.data == 1:
            return bytes(next(iter(fragments.values())))
        assert self._driver is not None  # without parity all k are needed
        headers = self._headers_of(length)
        chosen = itertools.islice(fragments.items(), self.data)
        # Anything but bytes would end the process.
        return self._driver.decode([b"".join((headers[number], fragment)) for number, fragment in chosen])

    def fragment_bytes(self, length: int) -> int:
        """Length in bytes of each fragment of a stripe of `length` bytes."""
        if self._driver is None:
            return -(-length // self.data)
        framed: int = self._driver.get_segment_info(length, length)["fragment_size"]
        return framed - _HEADER_BYTES

    def _headers_of(self, length: int) -> list[bytes]:
        """Headers that the backend puts before the fragments of any stripe of `length` bytes."""
        if length not in self._headers:
            assert self._driver is not None
            if len(self._headers) >= _MOST_HEADERS:
                self._headers.clear()
            self._headers[length] = [framed[:_HEADER_BYTES] for framed in self._driver.encode(bytes(length))]
        return self._headers[length]

    def _prove(self, backend: str) -> None:
        """Take a short stripe to fragments and back, with every choice of k unless any k suffice by construction."""
        from pyeclib.ec_iface import ECDriverError, ECInvalidParameter

        unfit = (
            f"peers.backend={backend!r}: expected any {self.data} of {self.fragments} fragments to give a record back"
        )
        remedy = f"choose one of {', '.join(sorted(_PROVEN))}"
        stripe = random.Random(self.fragments).randbytes(16 * self.data + 1)
        try:
            fragments = self.encode(stripe)
        except ECInvalidParameter:
            self._readable = bytes  # a pyeclib that takes nothing else
            fragments = self.encode(stripe)
        if {len(fragment) for fragment in fragments} != {self.fragment_bytes(len(stripe))}:
            raise ConfigurationError(f"{unfit}, found fragments of unequal length; {remedy}")
        choices = itertools.combinations(range(self.fragments), self.data)
        if backend in _PROVEN:
            choices = itertools.combinations(range(self.fragments)[-self.data - 1 :], self.data)
        elif (count := math.comb(self.fragments, self.data)) > _MOST_CHOICES:
            raise ConfigurationError(f"{unfit}, found {count} choices, too many to try; {remedy}")
        for choice in choices:
            try:
                whole = self.decode({number: fragments[number] for number in choice}, len(stripe)) == stripe
            except ECDriverError:
                whole = False
            if not whole:
                raise ConfigurationError(f"{unfit}, found that those numbered {list(choice)} do not; {remedy}")


def _as_array(stripe: Payload) -> Any:
    """Spares pyeclib a copy: of what it does not have to copy it takes arrays, and no views."""
    return np.frombuffer(stripe, np.uint8)


def _open_driver(data: int, parity: int, backend: str) -> ECDriver:
    """The backend for `data` and `parity` fragments.

    Raises:
        ConfigurationError: it is not there or does not take them; those that are there are named.
    """
    try:
        from pyeclib.ec_iface import VALID_EC_TYPES, ECDriver, ECDriverError
    except ImportError as error:
        raise ConfigurationError(
            f"peers: expected pyeclib, for k={data} and m={parity + 1}, found {error}; install it, or choose k=1 or m=1"
        ) from error
    if backend not in VALID_EC_TYPES:
        raise ConfigurationError(
            f"peers.backend: expected one that this machine has, {', '.join(sorted(VALID_EC_TYPES))}, found {backend!r}"
        )
    try:
        return ECDriver(ec_type=backend, k=data, m=parity)
    except ECDriverError as error:
        raise ConfigurationError(
            f"peers.backend={backend!r}: expected one that takes {data} fragments of data and {parity} of parity, "
            f"found that it does not ({error}); choose isa_l_rs_cauchy, or other k and m; there are "
            f"{', '.join(sorted(VALID_EC_TYPES))}"
        ) from error
