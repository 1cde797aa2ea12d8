"""What a message must be, as an equation between what its two other parties know.

Party ``q`` proves it to the party before it in the circle and to the party after it. In every entry of a shape
``sum_k u_k v_k + own_before + own_after = 0``: ``u_k`` and ``own_before`` are known to ``q`` and the party before it,
``v_k`` and ``own_after`` to ``q`` and the party after it, and the message is in the part of whoever received it. All
three file the same claim, each with what it knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from uvcc_engine.contract.errors import ProtocolError

NUMBERS: Final = "numbers"  # modulo 2^64
BITS: Final = "bits"  # modulo 2, bit by bit of words


@dataclass(frozen=True, slots=True, eq=False)
class BilinearClaim:
    """One party's part of an equation over ``shape``; None is what it does not know.

    ``before`` and ``after``: ``u_k`` and ``v_k``, ``terms`` tensors of that shape each; ``own_before`` and
    ``own_after`` have it, too.
    """

    prover: int
    algebra: str
    terms: int
    shape: tuple[int, ...]
    before: Sequence[Tensor] | None
    after: Sequence[Tensor] | None
    own_before: Tensor | None
    own_after: Tensor | None

    @property
    def count(self) -> int:
        """Numbers, or words, of the equation."""
        found = 1
        for side in self.shape:
            found *= side
        return found

    @property
    def words(self) -> int:
        """About how many words a party keeps for it, by the average of the three: public."""
        return self.count * (4 * self.terms + 2) // 3

    def known_before(self) -> Sequence[Tensor]:
        """The ``u_k``. Raises ProtocolError where the running party should know them and does not."""
        return self._there(self.before)

    def known_after(self) -> Sequence[Tensor]:
        """The ``v_k``. Raises ProtocolError where the running party should know them and does not."""
        return self._there(self.after)

    def own(self, *, before: bool) -> Tensor:
        """The summand that one of the two knows alone, of the claim's shape. Raises ProtocolError as above."""
        found = self.own_before if before else self.own_after
        if found is None or tuple(found.shape) != self.shape:
            raise ProtocolError("a claim lacks what this party's role should have", "report this: it is a defect")
        return found

    def _there(self, side: Sequence[Tensor] | None) -> Sequence[Tensor]:
        if side is None or len(side) != self.terms or any(tuple(t.shape) != self.shape for t in side):
            raise ProtocolError("a claim lacks what this party's role should have", "report this: it is a defect")
        return side
