"""The proof of everything that is in a party's ledger: three provers side by side, before anything is opened.

Each party proves to the other two that the messages which it sent for the ledger's claims are what the protocol makes
of the shares (Boneh, Boyle, Corrigan-Gibbs, Gilboa, Ishai, CRYPTO 2019; Boyle, Gilboa, Ishai, Nof,
CCS 2019, section 4.3, and ASIACRYPT 2020). One verifier, before the prover in the circle of parties, knows ``u``, the
one after it ``v``, and of the target each knows a summand (``statement``). A fold sends the coefficients of a
polynomial: one summand comes from the stream that the prover has in common with the first verifier, the other one is
sent to the second, so neither learns anything. Then a coin of the verifiers' common stream takes the place of the
polynomial's variable, and is told to the prover. The last fold takes all that is left; its two polynomials have a
random slope at their top, and the first verifier sends the second its value at a coin that the prover never learns,
with its summand of the product, in the round in which the second gets the coefficients. So the second one judges.

What is shown: sound against one of three parties (``folding.soundness_bits``), for whoever trusts that at most one is
corrupt. Numbers are proved in a Galois ring, bits in a binary field, side by side and in the same way. A failure names
the prover and one verifier: either of them can make it fail, nobody else. The coins are interactive, not a hash of the
messages, so a prover cannot try again and again.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

import torch
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError, PeerLostError, ProtocolError
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.parsing.canonical import sorted_json
from uvcc_engine.mpc.foundation.bilinear_claims import BilinearClaim
from uvcc_engine.mpc.foundation.claim_ledger import ProductNotes, ProvedStep
from uvcc_engine.mpc.foundation.opening import digest_of, open_ring_protocol
from uvcc_engine.mpc.foundation.roles import known
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Round, Runtime, par
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.proofs.algebra import Algebra
from uvcc_engine.proofs.audit_draws import agree_on_audit_protocol, audited, audited_others, note_unfinished
from uvcc_engine.proofs.binary_field import BinaryField
from uvcc_engine.proofs.bit_blocks import FieldBlock
from uvcc_engine.proofs.bit_statement import gather_bits, schedule_of_words, words_of
from uvcc_engine.proofs.challenges import SEED_WORDS, PublicCoins
from uvcc_engine.proofs.folding import BIT_DEGREE, DEGREE, Fold, proof_words, schedule
from uvcc_engine.proofs.galois_ring import GaloisRing
from uvcc_engine.proofs.held_opening import HeldOpening
from uvcc_engine.proofs.proof_sides import Gathered, ProofPart, ProverRandomness, one_protocol, replayed, with_last_coin
from uvcc_engine.proofs.second_round import Dispute, ProofTrace
from uvcc_engine.proofs.settling import OwedVerdict, StepFinding, settle_protocol
from uvcc_engine.proofs.statement import gather, sizes_of
from uvcc_engine.proofs.vectors import Arithmetic, NumberBlock
from uvcc_engine.proofs.verdicts import FAILED, HELD
from uvcc_engine.transcript.formats import kinds

T = TypeVar("T")
_HALF: Final = SEED_WORDS // 2
_CLAIMS, _COINS = b"UVCC_CLAIMS_V1", b"UVCC_COINS_V1"
_OF_INSTALMENTS = b"UVCC_INSTALMENTS_V1"


NOTHING_PROVED: Final = ProvedStep(0, (0, 0, 0), hashlib.sha256(_CLAIMS).digest(), hashlib.sha256(_COINS).digest())


def prove(rt: Runtime) -> ProvedStep:
    """Run :func:`prove_protocol`. Whoever leaves in an audit of its own step is named with that."""
    return prove_and_open(rt, ())[0]


def prove_silently(rt: Runtime) -> tuple[ProvedStep | None, OwedVerdict | None]:
    """Prove a step that opens nothing, where the run proves what it computes: what was proved, and what this party owes
    the others of it, where whoever drives the steps has that told later (``ClaimLedger.defers``)."""
    if rt.ledger is None:
        return None, None
    return prove_and_owe(rt) if rt.ledger.defers else (prove(rt), None)


def prove_and_open(rt: Runtime, values: Sequence[Share]) -> tuple[ProvedStep, list[Tensor]]:
    """Run :func:`prove_and_open_protocol`: ``values`` of any shapes are opened in them. Whoever leaves in an audit of
    its own step is named with that."""
    return _on_host(rt, prove_and_open_protocol(rt, [_at_home(rt, one) for one in values]))


def prove_and_owe(rt: Runtime) -> tuple[ProvedStep, OwedVerdict | None]:
    """Run :func:`prove_and_owe_protocol`. Whoever leaves in an audit of its own step is named with that."""
    return _on_host(rt, prove_and_owe_protocol(rt))


def find_on_host(rt: Runtime) -> tuple[ProvedStep, StepFinding | None]:
    """Run :func:`find_protocol`. Whoever leaves in an audit of its own step is named with that."""
    return _on_host(rt, find_protocol(rt))


def settle_on_host(rt: Runtime, finding: StepFinding, values: Sequence[Share], *, jointly: bool) -> HeldOpening | None:
    """Run ``settling.settle_protocol`` in the same way, for ``values`` of any shapes; the opening, to be put together,
    where there is one."""
    return _on_host(rt, settle_protocol(rt, finding, [_at_home(rt, one) for one in values], jointly=jointly))


def _at_home(rt: Runtime, one: Share) -> Share:
    return one if rt.on_processors else one.map(Tensor.cpu)


def _on_host(rt: Runtime, steps: MpcProtocol[T]) -> T:
    if not rt.on_processors:
        known(rt.ledger).bring_to_host()
    try:
        with rt.on_host():
            return rt.run(steps)
    except (PeerLostError, ProtocolError) as error:
        note_unfinished(rt, error)
        raise


def prove_protocol(
    rt: Runtime, ring: GaloisRing | None = None, *, bit_degree: int = BIT_DEGREE
) -> MpcProtocol[ProvedStep]:
    """:func:`prove_and_open_protocol`, opening nothing: verdicts are alone in their round, as a rule the seventh."""
    return (yield from prove_and_open_protocol(rt, (), ring, bit_degree=bit_degree))[0]


def prove_and_open_protocol(
    rt: Runtime, values: Sequence[Share], ring: GaloisRing | None = None, *, bit_degree: int = BIT_DEGREE
) -> MpcProtocol[tuple[ProvedStep, list[Tensor]]]:
    """Prove what the ledger holds, empty it, and open ``values`` to all if everything held: int64, in their shapes.

    The rounds of :func:`find_protocol`, and one more in which ``values`` are opened (``held_opening``), and the
    verdicts told beside it. Reveals ``values``.

    Raises ProofFailedError at every party if a proof does not hold at one of them; then nothing is opened, but to one
    that says so of proofs that held: it may have seen ``values``, which are right.
    ``ring`` and ``bit_degree``: of a smaller degree in tests.
    """
    proved, finding = yield from find_protocol(rt, ring, bit_degree=bit_degree)
    if finding is None:
        return proved, (yield from par(*(open_ring_protocol(rt, value) for value in values)))
    opening = yield from settle_protocol(rt, finding, values)
    return proved, [] if opening is None else opening.opened()


def prove_and_owe_protocol(
    rt: Runtime, ring: GaloisRing | None = None, *, bit_degree: int = BIT_DEGREE
) -> MpcProtocol[tuple[ProvedStep, OwedVerdict | None]]:
    """The rounds of :func:`find_protocol` and no other, in a step that opens nothing: what this party found is told
    and heard later, and until then the ledger lets no opening go (``settling.OwedVerdict``)."""
    proved, finding = yield from find_protocol(rt, ring, bit_degree=bit_degree)
    return proved, None if finding is None else OwedVerdict(rt, finding)


def find_protocol(
    rt: Runtime, ring: GaloisRing | None = None, *, bit_degree: int = BIT_DEGREE
) -> MpcProtocol[tuple[ProvedStep, StepFinding | None]]:
    """Prove what the ledger holds, and empty it: what this party finds, which nobody was told yet. None if there was
    nothing left to prove. What was proved covers the step's instalments, too. Raises ConfigError if the verdicts of the
    step before were not heard.

    2 rounds for the coins and the last fold, 2 for every other fold: 6 as a rule. Where one step in so many is audited
    (``audit_draws``), the provers that were not drawn leave out their proofs, and one round more says who was: 2 where
    nobody was.
    """
    ledger = known(rt.ledger)
    ledger.hear()  # a dealer may have taken nothing in so far
    if ledger.owes:
        raise ConfigError(
            "a step would be proved before the verdicts of the one before it were heard", "report this: it is a defect"
        )
    instalments = ledger.take_instalments()
    notes, claims = ledger.take()
    if not notes and not claims:
        return in_all(instalments), None
    ledger.hold_openings()
    at = Arithmetic(GaloisRing(ring.degree if ring is not None else DEGREE, rt.kernels), rt.kernels)
    field = BinaryField(bit_degree, rt.kernels)
    sizes = [sizes_of(notes, claims, q) for q in range(PARTIES)]
    words = [words_of(claims, q) for q in range(PARTIES)]
    folds, bit_folds = [schedule(s) for s in sizes], [schedule_of_words(n) for n in words]
    halves = _draw_seeds(rt)
    drawn, drawn_bits = draw_randomness(rt, at.ring, folds), draw_randomness(rt, field, bit_folds)
    if ledger.audit_one_in:  # whoever holds back what it owes may have heard both halves of its own seed by then
        ledger.audits = audited_others(halves, ledger.audit_one_in)
    seeds, agree = yield from _begin_protocol(rt, notes, halves)
    drew: tuple[int, ...] = ()
    if ledger.audit_one_in:
        drew = yield from agree_on_audit_protocol(rt, seeds)
        ledger.audits = audited(drew, ledger.audit_one_in)
        folds, bit_folds = (_of_audited(of_all, ledger.audits) for of_all in (folds, bit_folds))

    def of_numbers(q: int) -> Gathered:
        return lambda seed, sides: gather(
            at, notes, claims, q, rt.party, PublicCoins(at.ring, seed, bytes([q])), folds[q][0], sides
        )

    def of_bits(q: int) -> Gathered:
        return lambda seed, sides: gather_bits(
            field, claims, q, rt.party, PublicCoins(field, seed, b"bits" + bytes([q])), sides
        )

    parts: list[tuple[ProofPart, ProofPart]] = []
    for q in range(PARTIES):
        traces = ProofTrace(at.ring, folds[q]), ProofTrace(field, bit_folds[q])
        number = ProofPart(at.ring, folds[q], drawn[q], of_numbers(q), NumberBlock, traces[0])
        joined = functools.partial(FieldBlock, field)
        parts.append((number, ProofPart(field, bit_folds[q], drawn_bits[q], of_bits(q), joined, traces[1])))
    found = yield from par(*[one_protocol(rt, at, one, q, seeds[q]) for q in range(PARTIES) for one in parts[q]])
    verdicts = [max(found[2 * q], found[2 * q + 1]) for q in range(PARTIES)]
    coins = hashlib.sha256(_COINS)
    for word in (*seeds, *(w for both in parts for part in both for w in part.trace.words)):
        coins.update(word.contiguous().numpy().tobytes())

    def dispute(said: Mapping[int, Tensor]) -> Dispute:
        both = [[with_last_coin(part) for part in mine] for mine in parts]
        replay = functools.partial(replayed, at, parts)
        return Dispute(seeds, both, said, agree, ledger.copies_agree, replay, HELD, FAILED)

    entries = tuple(s.entries + 64 * n for s, n in zip(sizes, words, strict=True))
    proved = ProvedStep(len(notes) + len(claims), entries, _claims_digest(notes, claims), coins.digest(), drew)
    return in_all([*instalments, proved]), StepFinding(rt.epoch, verdicts, all(agree.values()), dispute)


def in_all(parts: Sequence[ProvedStep]) -> ProvedStep:
    """What a step's instalments and the proof at its end covered together. Only what is not audited has instalments."""
    if len(parts) < 2:
        return parts[0] if parts else NOTHING_PROVED
    entries = tuple(map(sum, zip(*(one.entries for one in parts), strict=True)))
    digest, coins = (hashlib.sha256(_OF_INSTALMENTS) for _ in range(2))
    for one in parts:
        digest.update(one.digest)
        coins.update(one.coins)
    return ProvedStep(sum(one.claims for one in parts), entries, digest.digest(), coins.digest())


def _of_audited(folds: list[list[Fold]], audits: tuple[int, ...]) -> list[list[Fold]]:
    """No folds, and so no proof, for a prover that was not drawn."""
    return [of_one if q in audits else [] for q, of_one in enumerate(folds)]


def _claims_digest(notes: Sequence[ProductNotes], claims: Sequence[BilinearClaim]) -> bytes:
    """Of what everybody may know of the claims."""
    hashed = hashlib.sha256(_CLAIMS)
    for one in notes:
        y, shift = one.y, one.truncation.s if one.truncation is not None else 0
        shapes = [list(t) for t in (one.x.shape, y.shape if y is not None else (), one.z.shape)]
        hashed.update(sorted_json([one.form, *shapes, one.factor, one.dealer, shift]).encode() + b"\n")
    for claim in claims:
        public = [claim.algebra, claim.prover, claim.terms, list(claim.shape)]
        hashed.update(sorted_json(public).encode() + b"\n")
    return hashed.digest()


def _draw_seeds(rt: Runtime) -> list[Tensor | None]:
    """The seed of every prover's coins at its two verifiers, ``[SEED_WORDS]``; None at the prover."""
    draws = rt.draws()
    found: list[Tensor | None] = [None] * PARTIES
    for c in (rt.party, rt.next):
        found[(c + 1) % PARTIES] = draws.ring(c, SEED_WORDS)
    return found


def draw_randomness(rt: Runtime, algebra: Algebra, folds: list[list[Fold]]) -> list[ProverRandomness]:
    """What masks and tests each prover's messages. Every holder of a component draws the same of its stream: coins,
    summands, slopes, in this order."""
    draws = rt.draws()
    found = [ProverRandomness() for _ in range(PARTIES)]
    for c in (rt.party, rt.next):
        other, before = (c + 1) % PARTIES, (c + 2) % PARTIES
        found[other].coins = draws.ring(c, len(folds[other]))
        found[c].summands = algebra.within(draws.ring(c, proof_words(folds[c]), algebra.width))
        found[c].slope_before = algebra.within(draws.ring(c, algebra.width))
        found[before].slope_after = algebra.within(draws.ring(c, algebra.width))
    return found


def _begin_protocol(
    rt: Runtime, notes: list[ProductNotes], drawn: list[Tensor | None]
) -> MpcProtocol[tuple[list[Tensor], dict[int, bool]]]:
    """Everybody tells both provers its half of their seeds, and the online parties compare what they opened: 1 round.

    Whoever sends a half has received every message that the coins are about, because the round before is over.
    """
    message = Round()
    for peer in (rt.next, rt.prev):
        half = slice(0, _HALF) if (rt.party + 1) % PARTIES == peer else slice(_HALF, SEED_WORDS)
        message.send(peer, kinds.COIN, known(drawn[peer])[half])
        message.send(peer, kinds.PROOF, _opened_digest(rt, notes, peer))
        message.want(peer, kinds.COIN, torch.int64, _HALF)
        message.want(peer, kinds.PROOF, torch.uint8, 32)
    got: list[Tensor] = yield message
    halves = {rt.next: got[0], rt.prev: got[2]}
    agree = {
        peer: torch.equal(digest, _opened_digest(rt, notes, peer))
        for peer, digest in ((rt.next, got[1]), (rt.prev, got[3]))
    }
    mine = torch.cat([halves[rt.prev], halves[rt.next]])
    return [mine if q == rt.party else known(drawn[q]) for q in range(PARTIES)], agree


def _opened_digest(rt: Runtime, notes: list[ProductNotes], peer: int) -> Tensor:
    """Of everything that this party and ``peer`` opened under masks as the two online parties."""
    both = (one.truncation for one in notes if one.dealer not in (rt.party, peer))
    return digest_of(b"UVCC_OPENED_V1", *(known(at.opened) for at in both if at is not None))
