"""After a proof that failed: who lied, as far as it can be said without showing anybody a secret.

The prover knows all that its two verifiers hold of its statement, so with their coins it can compute what each of them
had to compute. In the second round everybody states once more what it told in the proof, and what a third party can
check of its verdict: numbers that are uniform to whoever gets them, or that it could compute itself. Then each says
whom it suspects. Messages are not signed one by one, so of a message that its sender and its receiver describe
differently nobody can say who is right: of such a lie the pair stays, and the third party is cleared.

A party is suspected alone only for what no party does that follows the protocol: its own statement does not hold by
what it holds itself; it told a prover other coins than it states now; it repeats other numbers than it sent; it
computed something else than what follows from what it has in common with the prover; it judged against numbers that it
publishes itself. A statement "one of S lied" means: one of S, or who says so. Whoever is in all three may have lied.

It runs after a failure only. Nothing else than this round comes of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch import Tensor

from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.mpc.foundation.roles import known
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Round, Runtime
from uvcc_engine.proofs.algebra import Algebra
from uvcc_engine.proofs.challenges import SEED_WORDS
from uvcc_engine.proofs.folding import Fold
from uvcc_engine.transcript.formats import kinds

STREAM: Final = 1 << 30
"""Of the second round's messages: no program has so many microbatches."""
_HALF: Final = SEED_WORDS // 2
_LAST_WORD: Final = 3  # for the last coin where nobody has told it: any but 0 and 1

NOTHING_FOUND: Final = "what it states does not contradict what it told before"
CONFESSED: Final = "its own statement does not hold by what it holds itself"
OTHER_COINS: Final = "it told the prover other coins than it states now"
NOT_TOLD: Final = "it says that it was told other coins than it was"
REPEATED: Final = "it repeats other numbers than it sent in the proof"
COMPUTED: Final = "what it sent does not follow from what it holds in common with the prover"
JUDGED: Final = "it judged against the numbers that it states itself"
REFUSED: Final = "it refuses a proof that holds by what it states itself and by what the prover holds"
ACCUSED: Final = "it suspects somebody who did what the protocol says, or nobody else is left"


@dataclass(slots=True)
class ProofTrace:
    """What this party told or was told in one proof of a prover: kept until the verdicts are there.

    ``folds``: empty where there was none. ``words``: at the verifiers all coins, the last one included, as words
    ``[1]``; at the prover those that it was told. ``first``: the first verifier's end and value ``[2, width]``, at it
    and at the second one; ``judged``: the second one's own.
    """

    algebra: Algebra
    folds: list[Fold]
    words: list[Tensor] = field(default_factory=list)
    first: Tensor | None = None
    judged: Tensor | None = None


Replay = Callable[[int, int, Tensor, list[Tensor]], tuple[Tensor, bool]]
"""``(prover, part, seed, words)`` at the prover: the first verifier's numbers, and whether the second finds that the
proof holds, both as the prover knows them."""


@dataclass(frozen=True, slots=True)
class Dispute:
    """What the second round is about, at this party.

    ``seeds``: of the three provers' coins, as this party knows or was told them. ``traces``: two for each prover.
    ``verdicts``: what each party said of the three proofs; ``alike``: by peer, whether the two opened the same values
    under masks; ``common``: whether honest parties' copies agree then (``ClaimLedger.copies_agree``).
    """

    seeds: list[Tensor]
    traces: list[list[ProofTrace]]
    verdicts: Mapping[int, Tensor]
    alike: Mapping[int, bool]
    common: bool
    replay: Replay
    held: int
    failed: int

    def parts(self, q: int) -> list[tuple[int, ProofTrace]]:
        """The proofs of prover ``q`` that there are."""
        return [(k, one) for k, one in enumerate(self.traces[q]) if one.folds]


@dataclass(frozen=True, slots=True)
class SecondRoundFinding:
    """What the second round found, at this party, which knows of itself that it did not lie.

    ``own``: whom it suspects by its own sight, empty where by its own numbers it is this party itself. ``suspects``:
    one of them lied, by what the others state as well. ``stated``: by party, whom it suspects by its own word, None
    where it was silent. ``open_to``: who may have lied by the three statements alone, as a reader must see it who
    trusts that one at most did. ``why``: what the only suspect did.
    """

    own: tuple[int, ...]
    suspects: tuple[int, ...]
    stated: Mapping[int, tuple[int, ...] | None]
    open_to: tuple[int, ...]
    why: str

    @property
    def named(self) -> int:
        """Who lied, -1 where two may have."""
        return self.suspects[0] if len(self.suspects) == 1 else -1

    @property
    def silent(self) -> tuple[int, ...]:
        """Who did not answer."""
        return tuple(p for p, one in sorted(self.stated.items()) if one is None)

    @property
    def sentence(self) -> str:
        """The same in words, without a full stop."""
        if not self.own:
            found = "in the second round this party's own statement does not hold by what it holds itself"
        elif self.named >= 0:
            found = f"the second round names party {self.named}: {self.why}"
        else:
            found = f"the second round leaves parties {' and '.join(map(str, self.suspects))}"
        cleared = [p for p in range(PARTIES) if p not in self.open_to]
        if self.named < 0 and self.own and len(self.open_to) == 2:
            found += f", and clears party {cleared[0]} before all"
        for p in self.silent:
            found += f"; party {p} did not answer in it"
        return found


def second_round_protocol(rt: Runtime, dispute: Dispute) -> MpcProtocol[SecondRoundFinding]:
    """2 rounds, some kilobytes: state, then suspect. Never fails; a silent peer is waited for as for its proof."""
    rt.leave_program(STREAM)
    message = Round(patient=True)
    for peer in (rt.next, rt.prev):
        message.send(peer, kinds.FINDING, _stated(dispute, rt.party, peer))
        message.want(peer, kinds.FINDING, torch.int64, _size(dispute, peer, rt.party))
    got: list[Tensor | None] = yield message
    mine = _suspected(dispute, rt.party, dict(zip((rt.next, rt.prev), got, strict=True)))
    message = Round(patient=True)
    mask = sum(1 << p for p in mine.suspects)
    for peer in (rt.next, rt.prev):
        message.send(peer, kinds.FINDING, torch.tensor([mask], dtype=torch.uint8))
        message.want(peer, kinds.FINDING, torch.uint8, 1)
    got = yield message
    said = {
        peer: None if one is None else _named_by(int(one), peer)
        for peer, one in zip((rt.next, rt.prev), got, strict=True)
    }
    return _concluded(rt.party, mine, said)


def _named_by(mask: int, party: int) -> tuple[int, ...]:
    """Whom a party's byte names; who names itself, or nobody that there is, names nobody else."""
    found = tuple(p for p in range(PARTIES) if mask >> p & 1)
    return () if mask >> PARTIES or party in found else found


@dataclass(slots=True)
class _Suspicion:
    """Whom this party suspects by its own sight, and why the last of them."""

    suspects: tuple[int, ...]
    why: str = NOTHING_FOUND

    def only(self, party: int, why: str) -> None:
        """It was ``party``. The first reason stays; a second party would be a lie of two, of which nothing follows."""
        if len(self.suspects) > 1:
            self.suspects, self.why = (party,), why


def _concluded(me: int, mine: _Suspicion, said: Mapping[int, tuple[int, ...] | None]) -> SecondRoundFinding:
    stated: dict[int, tuple[int, ...] | None] = {me: mine.suspects, **said}

    def left(of: set[int]) -> tuple[int, ...]:
        for party, names in stated.items():
            if names is not None:
                of = of & ({*names} | {party})
        return tuple(sorted(of))

    everybody = left(set(range(PARTIES)))
    if not mine.suspects:  # by its own numbers it is this party
        others = tuple(p for p in range(PARTIES) if p != me)
        return SecondRoundFinding((), others, stated, everybody or tuple(range(PARTIES)), NOTHING_FOUND)
    found, why = left(set(mine.suspects)), mine.why
    if not found:  # two lied: nothing follows
        found = mine.suspects if len(mine.suspects) > 1 else tuple(p for p in range(PARTIES) if p != me)
    elif len(found) == 1 and len(mine.suspects) > 1:
        why = CONFESSED if said.get(found[0]) == () else ACCUSED
    return SecondRoundFinding(mine.suspects, found, stated, everybody or tuple(range(PARTIES)), why)


# -- what is stated ----------------------------------------------------------------------------------------------------


def _fields(dispute: Dispute, source: int, to: int) -> Iterator[tuple[int, int, int]]:
    """``(prover, part, words)`` of what ``source`` states to ``to``, in order; part -1 is about the seed."""
    for q in range(PARTIES):
        if not dispute.parts(q):
            continue
        first, judge = (q + 2) % PARTIES, (q + 1) % PARTIES
        if q in (source, to):
            yield q, -1, SEED_WORDS
        for k, one in dispute.parts(q):
            numbers = 2 * one.algebra.width
            if source == q:
                yield q, k, len(one.folds) - 1
            elif to == q:
                yield q, k, len(one.folds) + numbers
            else:
                assert {source, to} == {first, judge}
                yield q, k, numbers


def _size(dispute: Dispute, source: int, to: int) -> int:
    return sum(words for *_, words in _fields(dispute, source, to))


def _stated(dispute: Dispute, me: int, to: int) -> Tensor:
    """What this party states to another: ``[words]``."""
    found = [torch.empty(0, dtype=torch.int64)]
    for q, k, _ in _fields(dispute, me, to):
        if k < 0:
            found.append(dispute.seeds[q])
            continue
        one = dispute.traces[q][k]
        if q in (me, to):
            found += one.words
        if q != me:
            judges_to_first = to != q and me == (q + 1) % PARTIES
            found.append(known(one.judged if judges_to_first else one.first).reshape(-1))
    return torch.cat([part.reshape(-1) for part in found])


def _read(dispute: Dispute, source: int, me: int, message: Tensor) -> dict[tuple[int, int], Tensor]:
    """What ``source`` stated, by prover and part."""
    found, at = {}, 0
    for q, k, words in _fields(dispute, source, me):
        found[q, k] = message[at : at + words]
        at += words
    return found


# -- what follows ------------------------------------------------------------------------------------------------------


def _suspected(dispute: Dispute, me: int, got: Mapping[int, Tensor | None]) -> _Suspicion:
    found = _Suspicion(tuple(p for p in range(PARTIES) if p != me))
    told = {p: _read(dispute, p, me, one) for p, one in got.items() if one is not None}
    dispute = replace(dispute, replay=_once(dispute.replay))
    if not all(_holds_by_itself(dispute, me, told)):
        return _Suspicion((), CONFESSED)
    for p, stated in told.items():
        for q in range(PARTIES):
            if not dispute.parts(q):
                continue
            if q == me:
                _as_prover(dispute, me, p, stated, found)
            elif q == p:
                _of_prover(dispute, me, p, stated, found)
            elif p == (q + 2) % PARTIES:
                _of_first(dispute, q, p, stated, found)
            else:
                _of_judge(dispute, q, p, stated, found)
    return found


def _once(replay: Replay) -> Replay:
    """A replay that is as long as the proof, and that both verifiers ask for with the same coins if neither lies."""
    known: dict[tuple[int, int, bytes], tuple[Tensor, bool]] = {}

    def replayed(q: int, k: int, seed: Tensor, words: list[Tensor]) -> tuple[Tensor, bool]:
        key = q, k, torch.cat([seed, *words]).numpy().tobytes()
        if key not in known:
            known[key] = replay(q, k, seed, words)
        return known[key]

    return replayed


def _holds_by_itself(dispute: Dispute, me: int, told: Mapping[int, Mapping[tuple[int, int], Tensor]]) -> Iterator[bool]:
    """Whether this party's own proofs hold by all that it holds, with the coins that it was told. The last one, which
    it was not, is what a verifier states; any will do."""
    for k, one in dispute.parts(me):
        at = len(one.folds) - 1
        last = next((said[me, k][at : at + 1] for said in told.values()), torch.tensor([_LAST_WORD]))
        yield dispute.replay(me, k, dispute.seeds[me], [*one.words, last])[1]


def _as_prover(dispute: Dispute, me: int, p: int, stated: Mapping[tuple[int, int], Tensor], found: _Suspicion) -> None:
    """At the prover: what verifier ``p`` states about my proofs."""
    judge = p == (me + 1) % PARTIES
    half = slice(_HALF, None) if judge else slice(0, _HALF)
    seed, mine = stated[me, -1], dispute.seeds[me]
    if not torch.equal(seed[half], mine[half]):
        found.only(p, OTHER_COINS)
        return
    same_coins, right = torch.equal(seed, mine), True
    for k, one in dispute.parts(me):
        count = len(one.folds)
        words, numbers = stated[me, k][:count], stated[me, k][count:]
        if not _possible(one, words):
            found.only(p, OTHER_COINS)  # no verifier has such coins
            return
        same = torch.equal(words[:-1], _folds_words(one))
        if judge and not same:
            found.only(p, OTHER_COINS)
            return
        same_coins &= same
        first = dispute.replay(me, k, seed, [words[n : n + 1] for n in range(count)])[0]
        right &= torch.equal(first.reshape(-1), numbers)
    if not dispute.common or not dispute.alike[p]:
        return
    if not judge and not right:
        found.only(p, COMPUTED)
    if judge and right and same_coins and int(dispute.verdicts[p][me]) == dispute.failed:
        found.only(p, REFUSED)


def _folds_words(one: ProofTrace) -> Tensor:
    """The coins of all folds but the last ``[folds - 1]``, as this party told or was told them."""
    return torch.cat([torch.empty(0, dtype=torch.int64), *one.words[: len(one.folds) - 1]])


def _possible(one: ProofTrace, words: Tensor) -> bool:
    """Whether these are coins: the folds' within the degree."""
    if one.algebra.degree >= 64:
        return True
    return bool(((words[:-1] >> one.algebra.degree) == 0).all())


def _of_prover(dispute: Dispute, me: int, q: int, stated: Mapping[tuple[int, int], Tensor], found: _Suspicion) -> None:
    """At a verifier: what the prover says that it was told."""
    judge = me == (q + 1) % PARTIES
    half = slice(_HALF, None) if judge else slice(0, _HALF)
    right = torch.equal(stated[q, -1][half], dispute.seeds[q][half])
    if judge:
        for k, one in dispute.parts(q):
            right &= torch.equal(stated[q, k], _folds_words(one))
    if not right:
        found.only(q, NOT_TOLD)


def _of_first(dispute: Dispute, q: int, p: int, stated: Mapping[tuple[int, int], Tensor], found: _Suspicion) -> None:
    """At the second verifier: what the first one repeats."""
    for k, one in dispute.parts(q):
        if not torch.equal(stated[q, k], known(one.first).reshape(-1)):
            found.only(p, REPEATED)


def _of_judge(dispute: Dispute, q: int, p: int, stated: Mapping[tuple[int, int], Tensor], found: _Suspicion) -> None:
    """At the first verifier: whether the second one's verdict is that of its numbers and mine."""
    holds = True
    for k, one in dispute.parts(q):
        algebra, mine = one.algebra, known(one.first)
        end, value = algebra.within(stated[q, k]).reshape(2, -1)
        left, right = algebra.mul(end, mine[0]), algebra.add(value, mine[1])
        holds &= torch.equal(left, right)
    if int(dispute.verdicts[p][q]) != (dispute.held if holds else dispute.failed):
        found.only(p, JUDGED)
