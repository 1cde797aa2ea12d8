"""How what a party found of a step's proofs is told and heard: beside what the step opens, or later where it opens
nothing.

Nothing is opened before every party has heard both others. A step that opens something says what was found in that
round, with its halves (``held_opening``). A step that opens nothing has no such round: each party owes its verdict
until the two others need it. It goes with the party's signed root of the step, beside the vote of the next one, and is
heard before the first message of the next one is taken in, and before its proof; in a party of several workers before
its proof. What was sent by then is masked as every message is, so it tells nothing of numbers that a lie has spoilt,
as no message before the end of the step itself does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from uvcc_engine.contract.errors import ProtocolError
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.mpc.foundation.roles import known
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.proofs.held_opening import HeldOpening
from uvcc_engine.proofs.second_round import Dispute, second_round_protocol
from uvcc_engine.proofs.verdicts import FAILED, HELD, NOT_MINE, failure_of, flags_of, found_true, tell_verdicts_protocol

VERDICT_BYTES: Final = PARTIES + 1


@dataclass(frozen=True, slots=True)
class StepFinding:
    """What one party found of the proofs of ``epoch`` before it has heard another: of the three provers, and whether
    what it opened under masks is what its peers say. ``dispute``: what a second round would be about."""

    epoch: int
    verdicts: list[int]
    agree: bool
    dispute: Callable[[Mapping[int, Tensor]], Dispute]

    @classmethod
    def of_nothing(cls, rt: Runtime) -> StepFinding:
        """Of a place at which there was nothing to prove."""

        def dispute(said: Mapping[int, Tensor]) -> Dispute:
            return Dispute([], [[] for _ in range(PARTIES)], said, {}, False, _no_replay, HELD, FAILED)

        return cls(rt.epoch, [HELD if q == rt.prev else NOT_MINE for q in range(PARTIES)], True, dispute)

    def held(self, rt: Runtime) -> bool:
        """Whether all that this party judges held."""
        return found_true(rt, self.verdicts, self.agree)


def settle_protocol(
    rt: Runtime, finding: StepFinding, values: Sequence[Share], *, jointly: bool = True
) -> MpcProtocol[HeldOpening | None]:
    """Tell the verdicts, and exchange the halves of ``values`` of any shapes beside them: 1 round. Raises
    ProofFailedError after the second round if one of them is bad.

    ``jointly``: whether all that this party's other workers judge held as well; if not, this one releases nothing, and
    the worker where it did not says why. Where there are others, the opening may be put together once they have all
    heard their verdicts, too.
    """
    ledger = known(rt.ledger)
    opening = HeldOpening(rt, values) if values else None
    release = jointly and finding.held(rt)
    if opening is not None and release:
        ledger.all_proved()
    said = yield from tell_verdicts_protocol(rt, finding.verdicts, finding.agree, opening, release=release)
    ledger.hold_openings()
    ledger.audits = ()
    yield from _judged_protocol(rt, finding, said)
    if not ledger.sisters:
        ledger.all_proved()
    return opening


def _judged_protocol(rt: Runtime, finding: StepFinding, said: Mapping[int, Tensor]) -> MpcProtocol[None]:
    """Raises ProofFailedError, after the second round, if somebody found a fault."""
    if (failure := failure_of(rt, finding.epoch, said, finding.agree)) is not None:
        raise failure.settled((yield from second_round_protocol(rt, finding.dispute(said))))


def _no_replay(q: int, k: int, seed: Tensor, words: list[Tensor]) -> tuple[Tensor, bool]:
    raise AssertionError("there is no proof to replay")


class OwedVerdict:
    """A verdict that is not told yet, of a step that opened nothing. Until the others' are heard nothing is opened."""

    def __init__(self, rt: Runtime, finding: StepFinding) -> None:
        self._rt, self._finding = rt, finding
        known(rt.ledger).owes = True
        self.held = finding.held(rt)
        """Whether this party may sign that the step was proved."""

    @property
    def epoch(self) -> int:
        """The step that it is about."""
        return self._finding.epoch

    @property
    def said(self) -> bytes:
        """What this party tells both others."""
        return flags_of(self._finding.verdicts, self._finding.agree).numpy().tobytes()

    def take_as_held(self) -> None:
        """In a replay, which speaks with nobody: what the parties said was heard when they computed."""
        known(self._rt.ledger).owes = False
        known(self._rt.ledger).all_proved()

    def hear(self, told: Mapping[int, bytes], before_dispute: Callable[[], None] = lambda: None) -> None:
        """Take in what the two others found, by party. Raises ProofFailedError, after the second round, if somebody
        found a fault; then this and every other party ends, and nothing of the step, nor of the one after it, was
        revealed. ``before_dispute`` is called before a second round. Raises ProtocolError naming the sender for a
        verdict of another size."""
        rt, ledger = self._rt, known(self._rt.ledger)
        for peer, one in told.items():
            if len(one) != VERDICT_BYTES:
                raise ProtocolError(
                    f"party {peer} sent {len(one)} bytes for its verdict of step {self.epoch}", party=peer
                )
        said = {peer: torch.frombuffer(bytearray(one), dtype=torch.uint8) for peer, one in told.items()}
        said[rt.party] = flags_of(self._finding.verdicts, self._finding.agree)
        if failure_of(rt, self.epoch, said, self._finding.agree) is not None:
            before_dispute()
        with rt.on_host():
            rt.run(_judged_protocol(rt, self._finding, said))
        ledger.audits, ledger.owes = (), False
        ledger.all_proved()
