"""What is opened in the round in which the verdicts are told: nobody learns it unless both others release it.

The component that a party lacks is held by the other two, and these two are the verifiers of its proof. Each sends a
half of it: the party before it the component under a mask, the party after it the mask, which is drawn from the
stream that only the two have. What arrives is uniform as long as one of them withholds its half, so nobody has
to hear the verdicts first. Whoever has found that something does not hold sends zeros.

A half carries 256 random bits of its own, and the other holder sends its hash. So an altered half is found, as an
altered component is in ``mpc.foundation.opening``, and the hash of a half that is withheld says nothing of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from uvcc_engine.contract.errors import ProtocolError
from uvcc_engine.mpc.foundation.opening import digest_of
from uvcc_engine.mpc.foundation.runtime import Round, Runtime
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.transcript.formats import kinds

_NONCE: Final = 4  # words
_DIGEST: Final = 32


class HeldOpening:
    """``values`` of any shapes, opened to all three parties or, if one that follows the protocol refuses, to nobody.

    No round of its own: 48 bytes an element and 384 over the three parties. Reveals ``values`` where all release them.
    Every party makes one at the same place of the program.
    """

    def __init__(self, rt: Runtime, values: Sequence[Share]) -> None:
        self._rt, self._values = rt, values
        self.got: Sequence[Tensor] = ()
        """What came of what :meth:`add_to` asked for."""
        self._count = sum(value.n for value in values)
        draws = rt.draws()
        to_next, to_prev = (draws.ring(c, self._count + 2 * _NONCE) for c in (rt.party, rt.next))
        mine, following = (torch.cat([v.reshape(-1) for v in side]) for side in self._components())
        # to the party after this one and the one before it: what either gets one of, and the other holder the other
        self.masked = _masked(mine, to_next), _masked(following, to_prev)
        self.masks = to_next[: self._count + _NONCE], to_prev[: self._count + _NONCE]

    def _components(self) -> tuple[list[Tensor], list[Tensor]]:
        return [value.first for value in self._values], [value.second for value in self._values]

    def add_to(self, message: Round, *, release: bool) -> None:
        """Send this party's halves, or zeros in their place, in this round, and ask for those of the other two."""
        rt = self._rt
        for peer, kept, other in (
            (rt.next, self.masked[0], self.masks[0]),
            (rt.prev, self.masks[1], self.masked[1]),
        ):
            for part, dtype in ((kept, torch.int64), (half_digest(other), torch.uint8)):
                message.send(peer, kinds.OPEN, part if release else torch.zeros_like(part))
                message.want(peer, kinds.OPEN, dtype, len(part))

    def opened(self) -> list[Tensor]:
        """The values, int64 in their shapes, from what the others released, once nobody has refused.

        ProtocolError naming the pair if the two holders of what this party lacks disagree.
        """
        rt = self._rt
        mask, of_masked, masked, of_mask = self.got
        if not torch.equal(half_digest(masked), of_masked) or not torch.equal(half_digest(mask), of_mask):
            raise ProtocolError(
                f"parties {rt.prev} and {rt.next} disagree on a share opened to party {rt.party}: one of them altered"
                " it",
                "stop the run and compare both parties' transcripts of this epoch",
            )
        missing = torch.split((masked - mask)[: self._count], [value.n for value in self._values])
        return [
            value.first + value.second + part.reshape(value.shape)
            for value, part in zip(self._values, missing, strict=True)
        ]


def _masked(component: Tensor, drawn: Tensor) -> Tensor:
    """A component ``[n]`` under its mask, and the bits of its own after it."""
    count = len(component)
    return torch.cat([component + drawn[:count], drawn[count + _NONCE :]])


def half_digest(half: Tensor) -> Tensor:
    """The hash of a half, words ``[n]``, as bytes ``[32]``."""
    return digest_of(b"UVCC_HALF_V1", half)
