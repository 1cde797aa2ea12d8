"""Gathers and sums of small tensors in as many rounds as a group's size can be halved.

Where every member sends to every other, a group's messages grow with the square of its members. Here a member sends
one message a round, to the member so many places on that half of its blocks are left to move, and a group's messages
grow with n log n (Bruck et al., "Efficient Algorithms for All-to-All Communications", IEEE TPDS 1997, section 4; the
sums go the same way backwards). Any number of members; no more bytes than directly.

The first message leaves when an operation starts, the others while it is waited for: members wait for their operations
in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

import torch
from torch import Tensor

from uvcc_engine.parallel.member_connection import MemberConnection, flush, memory_of

MEMBERS: Final = 8
"""Up to so many everything is sent directly: that takes one round, and here no more processor time."""
BYTES: Final = 12 << 10
"""The largest block that goes this way: with larger ones it is bytes that cost, and these are copied more often."""
_Lines = Mapping[int, MemberConnection]


def worth_it(size: int, block: Tensor) -> bool:
    """Whether a group of ``size`` members moves blocks of any shape like this one by halves. All find the same."""
    return size > MEMBERS and block.numel() * block.element_size() <= BYTES


def halvings(size: int) -> Iterator[tuple[int, int]]:
    """By round: how many of the blocks stay, and how many go."""
    while size > 1:
        stay = -(-size // 2)
        yield stay, size - stay
        size = stay


def gathered(lines: _Lines, me: int, key: int, mine: Tensor) -> Callable[[Tensor], None]:
    """Start to collect ``mine``, of shape (n,), of every member; the call that is returned fills (size, n) with them.

    That call and this one raise RuntimeError if a member is gone or does not come in time.
    """
    size = len(lines) + 1
    blocks = torch.empty((size, mine.numel()), dtype=mine.dtype)  # block k is that of the member k places on
    blocks[0] = mine
    rounds, sent = list(halvings(size))[::-1], dict[MemberConnection, int]()

    def send(have: int, count: int) -> None:
        line = lines[(me - have) % size]
        sent[line] = line.send(key, memory_of(blocks[:count]))

    send(*rounds[0])

    def finish(parts: Tensor) -> None:
        for number, (have, count) in enumerate(rounds):
            if number:
                send(have, count)
            lines[(me + have) % size].receive(key, memory_of(blocks[have : have + count]))
        parts[me:] = blocks[: size - me]
        parts[:me] = blocks[size - me :]
        flush(sent)

    return finish


def scattered(lines: _Lines, me: int, key: int, parts: Tensor) -> Callable[[], Tensor]:
    """Start to add up every member's row ``me`` of its ``parts``, of shape (size, n); the call that is returned gives
    the sum, of shape (n,).

    That call and this one raise RuntimeError if a member is gone or does not come in time.
    """
    size = len(lines) + 1
    sums = torch.cat([parts[me:], parts[:me]])  # row k is for the member k places on
    rounds, sent = list(halvings(size)), dict[MemberConnection, int]()

    def send(stay: int, go: int) -> None:
        line = lines[(me + stay) % size]
        sent[line] = line.send(key, memory_of(sums[stay : stay + go]))

    send(*rounds[0])

    def finish() -> Tensor:
        theirs = torch.empty((rounds[0][1], sums.shape[1]), dtype=sums.dtype)
        for number, (stay, go) in enumerate(rounds):
            if number:
                send(stay, go)
            lines[(me - stay) % size].receive(key, memory_of(theirs[:go]))
            sums[:go] += theirs[:go]
        flush(sent)
        return sums[0]

    return finish
