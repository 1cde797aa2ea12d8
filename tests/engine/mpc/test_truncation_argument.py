"""The argument for the dealer's truncation, in full: every view in a small ring, counted over every draw there is.

The protocol is written down here a second time, over 4 bits in place of 64, from the manual's words alone
(docs/security/arguments.md).
"""

from __future__ import annotations

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


def counts(z: int, s: int, me: str, *, reduced: bool = True) -> dict[int, int]:
    values, found = np.unique(run(z, s, me, reduced=reduced)[0], return_counts=True)
    return dict(zip(values.tolist(), found.tolist(), strict=True))


@pytest.mark.parametrize("s", [1, 2])
def test_the_result_is_the_floor_or_one_above(s: int) -> None:
    for z in SECRETS:
        assert set(run(z, s, "left")[1].tolist()) <= {z >> s, (z >> s) + 1}


@pytest.mark.parametrize("me", ["left", "right"])
@pytest.mark.parametrize("s", [1, 2])
def test_a_view_is_exactly_uniform_whatever_the_secret(s: int, me: str) -> None:
    first, *rest = [counts(z, s, me) for z in SECRETS]
    assert len(set(first.values())) == 1
    assert len(first) == RING**3 * (1 << s) ** 3
    assert all(other == first for other in rest)


@pytest.mark.parametrize("me", ["left", "right"])
def test_with_the_carry_left_in_the_view_depends_on_the_secret(me: str) -> None:
    assert counts(SECRETS[0], 1, me, reduced=False) != counts(SECRETS[-1], 1, me, reduced=False)
