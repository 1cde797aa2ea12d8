"""The dealer's and the online pair's places in a protocol with a dealer.

Dealer ``d`` knows components ``d`` and ``d + 1``; the two online parties share component ``d + 2``. Hence a secret
``x`` splits as ``u + v``: ``u = x_d + x_{d+1}`` known to the dealer, ``v = x_{d+2}`` known to both online parties.
Party ``left = d + 1`` shares component ``d + 1`` with the dealer, party ``right = d + 2`` shares component ``d``. A
value that the online parties hold additively or by XOR between the two of them is called pair-shared; the dealer
learns nothing about it, and hands out correlated randomness instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from uvcc_engine.contract.errors import ProtocolError
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.mpc.foundation.share import Share

T = TypeVar("T")


def known(x: T | None) -> T:
    """``x``, which the running party's role guarantees to be there. Raises ProtocolError if it is not."""
    if x is None:
        raise ProtocolError("a value is missing that this party's role should have", "report this: it is a defect")
    return x


@dataclass(frozen=True, slots=True)
class Roles:
    """Places relative to dealer ``d`` and what the running party is."""

    d: int
    party: int

    @property
    def left(self) -> int:
        """The party after the dealer, which works online."""
        return (self.d + 1) % 3

    @property
    def right(self) -> int:
        """The party before the dealer, which works online."""
        return (self.d + 2) % 3

    @property
    def is_dealer(self) -> bool:
        """Whether the running party deals."""
        return self.party == self.d

    @property
    def is_left(self) -> bool:
        """Whether the running party is the one after the dealer."""
        return self.party == self.left

    @property
    def is_right(self) -> bool:
        """Whether the running party is the one before the dealer."""
        return self.party == self.right

    @property
    def with_left(self) -> int:
        """The component that dealer and left share."""
        return self.left

    @property
    def with_right(self) -> int:
        """The component that dealer and right share."""
        return self.d

    @property
    def online(self) -> int:
        """The component that the online parties share."""
        return self.right

    @property
    def other(self) -> int:
        """For an online party: the other online party."""
        return self.right if self.is_left else self.left

    @property
    def mine(self) -> int:
        """For an online party: the component that it shares with the dealer."""
        return self.with_left if self.is_left else self.with_right


_ROLES = {(d, party): Roles(d, party) for d in range(3) for party in range(3)}


def roles(rt: Runtime, dealer: int) -> Roles:
    """The places in a piece of work that ``dealer`` (any number, modulo 3) deals, as the running party sees them."""
    return _ROLES[dealer % 3, rt.party]


def meets_both(role: Roles | None) -> tuple[bool, bool]:
    """Of a product's two left components, which are multiplied by both right ones, and not by the other one alone; see
    ``products.arithmetic.terms``. None: nobody deals."""
    return (True, False) if role is None else (role.is_dealer, not role.is_right)


def online_part(rt: Runtime, role: Roles, x: Share) -> Tensor:
    """For an online party: its copy of component ``d + 2``. Shape of the share."""
    return x.second if role.is_left else x.first


def mine_part(role: Roles, x: Share) -> Tensor:
    """For an online party: its copy of the component that it shares with the dealer. Shape of the share."""
    return x.first if role.is_left else x.second


@dataclass(frozen=True, slots=True)
class Places:
    """Where the components of a result go, for the two that this party holds; None where it has no memory yet."""

    with_left: Tensor | None = None
    with_right: Tensor | None = None
    online: Tensor | None = None


def places(role: Roles, out: Share | None) -> Places:
    """The memory of ``out`` by component. Shape of ``out``."""
    if out is None:
        return Places()
    if role.is_dealer:
        return Places(with_left=out.second, with_right=out.first)
    if role.is_left:
        return Places(with_left=out.first, online=out.second)
    return Places(with_right=out.second, online=out.first)


def assemble(
    role: Roles, *, with_left: Tensor | None, with_right: Tensor | None, online: Tensor | None, f: int
) -> Share:
    """The replicated share of this party from the components it knows (the third is None).

    All parts have one shape, that of the share.
    """
    if role.is_dealer:
        return Share(known(with_right), known(with_left), f)
    if role.is_left:
        return Share(known(with_left), known(online), f)
    return Share(known(online), known(with_right), f)
