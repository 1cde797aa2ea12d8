"""The argument for the dealer's truncation, in full: every view in a small ring, counted over every draw there is.

The protocol is written down here a second time, over 4 bits in place of 64, from the manual's words alone
(docs/security/arguments.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest

Numbers = np.ndarray[Any, np.dtype[np.int64]]
BITS: Final = 4
RING: Final = 1 << BITS
OFFSET: Final = RING >> 2
SECRETS: Final = range(-OFFSET + 1, OFFSET)
OWN: Final = 5  # the online party's own summand: it knows it, so it is fixed here


def run(z: int, s: int, me: str, *, reduced: bool = True) -> tuple[Numbers, Numbers]:
    """(what ``me``, left or right, sees; the result) for every draw of the streams and of the dealer.

    ``reduced``: the parts of the upper bits are taken modulo 2^s, as they must be.
    """
    small, upper_ring = 1 << s, RING >> s
    sizes = (RING, RING, small, RING, small, small)
    x, y, low, theirs, k_right, m_right = (a.ravel() for a in np.indices(sizes, dtype=np.int64))
    upper = -(x + y) % upper_ring
    overflow = -(x + y + upper) % RING // upper_ring
    r = upper * small + low
    masked = (z + OFFSET - OWN - theirs + r) % RING
    c = (masked + OWN + theirs) % RING
    k_left, m_left = (overflow - k_right) % small, ((r >> (BITS - 1)) - m_right) % small
    positive = 1 - (c >> (BITS - 1))
    part_left, part_right = k_left + m_left * positive, k_right + m_right * positive
    if reduced:
        part_left, part_right = part_left % small, part_right % small
    online = ((c >> s) + (part_left + part_right) * upper_ring - (OFFSET >> s)) % RING
    result = (online + x + y + RING // 2) % RING - RING // 2
    seen = (x, k_left, m_left, part_right) if me == "left" else (y, k_right, m_right, part_left)
    view = np.zeros_like(x)
    for value in (*seen, theirs, masked):
        view = view * RING + value
    return view, result


def run_own(z: int, s: int, me: str, *, hidden: bool = True) -> tuple[Numbers, Numbers]:
    """The same where the dealer's own summand is the mask, but for its lower bits.

    ``hidden``: those are, as they must be, drawn by the dealer; else its summand's own are shown.
    """
    small, upper_ring = 1 << s, RING >> s
    sizes = (RING, RING, small, small, small, small)
    x, theirs, low, k_left, m_left, k_right = (a.ravel() for a in np.indices(sizes, dtype=np.int64))
    own_of_dealer = (z - OWN - theirs) % RING
    shown = (own_of_dealer + (low if hidden else 0)) % small
    r = (shown - own_of_dealer) % RING
    y = (-(r >> s) - x - (k_left + k_right) * upper_ring) % RING
    m_right = ((r >> (BITS - 1)) - m_left) % small
    c = (OWN + theirs + shown + OFFSET) % RING
    positive = 1 - (c >> (BITS - 1))
    part_left, part_right = (k_left + m_left * positive) % small, (k_right + m_right * positive) % small
    online = ((c >> s) + (part_left + part_right) * upper_ring - (OFFSET >> s)) % RING
    result = (online + x + y + RING // 2) % RING - RING // 2
    seen = (x, k_left, m_left, part_right) if me == "left" else (y, k_right, m_right, part_left)
    view = np.zeros_like(x)
    for value in (*seen, theirs, shown):
        view = view * RING + value
    return view, result


def counts(z: int, s: int, me: str, by: Callable[..., tuple[Numbers, Numbers]] = run, **how: bool) -> dict[int, int]:
    values, found = np.unique(by(z, s, me, **how)[0], return_counts=True)
    return dict(zip(values.tolist(), found.tolist(), strict=True))


BOTH = pytest.mark.parametrize(("by", "shown"), [(run, RING), (run_own, 0)])


@BOTH
@pytest.mark.parametrize("s", [1, 2])
def test_the_result_is_the_floor_or_one_above(s: int, by: Callable[..., tuple[Numbers, Numbers]], shown: int) -> None:
    for z in SECRETS:
        assert set(by(z, s, "left")[1].tolist()) <= {z >> s, (z >> s) + 1}


@BOTH
@pytest.mark.parametrize("me", ["left", "right"])
@pytest.mark.parametrize("s", [1, pytest.param(2, marks=pytest.mark.ci(__file__))])
def test_a_view_is_exactly_uniform_whatever_the_secret(
    s: int, me: str, by: Callable[..., tuple[Numbers, Numbers]], shown: int
) -> None:
    """An output component, the other's summand and what is shown of the dealer's, and three numbers modulo 2^s."""
    first, *rest = [counts(z, s, me, by) for z in SECRETS]
    assert len(set(first.values())) == 1
    assert len(first) == RING**2 * (shown or 1 << s) * (1 << s) ** 3
    assert all(other == first for other in rest)


@pytest.mark.parametrize("me", ["left", "right"])
def test_with_the_carry_left_in_the_view_depends_on_the_secret(me: str) -> None:
    assert counts(SECRETS[0], 1, me, reduced=False) != counts(SECRETS[-1], 1, me, reduced=False)


@pytest.mark.parametrize("me", ["left", "right"])
def test_with_the_summand_s_own_lower_bits_shown_the_view_depends_on_the_secret(me: str) -> None:
    assert counts(SECRETS[0], 1, me, run_own, hidden=False) != counts(SECRETS[-2], 1, me, run_own, hidden=False)


def test_a_mask_without_lower_bits_of_its_own_rounds_down() -> None:
    """What the twins of trainings rely on, whose streams give zeros: the floor, whoever holds the value."""
    for z in SECRETS:
        for own in range(RING):
            shown = own % 4
            r, c = (shown - own) % RING, (z - own + shown + OFFSET) % RING
            borrowed = (r >> (BITS - 1)) * (1 - (c >> (BITS - 1))) * (RING >> 2)
            assert ((c >> 2) - (r >> 2) + borrowed - (OFFSET >> 2) - (z >> 2)) % RING == 0
