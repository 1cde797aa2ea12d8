"""The battery of lies: every message of every protocol altered in every way, with its proof and without. By hand.

``python tests/engine/proofs/battery.py --shard 0/2 --out FILE`` runs every second case, in an order that a seed fixes,
and writes what came of them as it goes on; ``--merge FILES`` adds up what shards wrote. A case is a lie of one party,
either one that it stands by (it computes on with the altered numbers) or one told to a single peer: an error in one
lane, a message in place of another, an earlier message again. With the proof an honest party must end with an error
before anything is opened, and every pair that an honest one names must have the liar in it. Without the proof nobody
must notice the same lie, or the case shows nothing. With ``--covert N`` a party is audited in one step of N: where the
liar was drawn the lie must be caught, and what became of the others is counted. Numbers modulo 2^s travel in wider
words, whose upper bits mean nothing: where only such bits were altered, every other message of the run is bit for bit
what it would have been, and the case counts as void.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from proof_kit import (
    LEARNED,
    PROTOCOLS,
    WHOLE,
    Ending,
    Message,
    alter,
    altered,
    lies_again,
    misnamed,
    normal,
    run_proved,
)

from uvcc_engine.contract.errors import ProofFailedError, ProtocolError
from uvcc_engine.proofs.audit_draws import audited
from uvcc_engine.proofs.galois_ring import GaloisRing

INPUTS = (normal(1, 3, 4), normal(2, 4, 3))
SHAPED = {
    "chosen": (normal(1, 3, 3), normal(2, 1, 3)),
    "patches": (normal(1, 8, 3), normal(2, 3, 4)),
    "batched": (normal(1, 2, 2, 3, 4), normal(2, 2, 2, 4, 3)),
}
ALL = PROTOCOLS | WHOLE | LEARNED
ERRORS = ("one", "top", "random", "bit", "swapped", "all")
RING = GaloisRing(31)  # misses one lie in millions


@dataclass(frozen=True)
class Case:
    """One lie. ``number``: of what the liar sends, where it stands by it; ``message``, ``other``: on the way."""

    name: str
    dealer: int
    liar: int
    how: str
    seed: int
    number: int = -1
    message: Message | None = None
    other: Message | None = None


@dataclass
class Found:
    """What came of the cases so far. Without a proof: ``through``, nobody noticed; ``wrong``, of them, somebody opened
    another value than in the honest run (a lie in the bits that a truncation drops does not show)."""

    cases: Counter[str] = field(default_factory=Counter)
    caught: int = 0
    by_proof: int = 0
    undetected: list[Case] = field(default_factory=list)
    misnamed: list[Case] = field(default_factory=list)
    void: list[Case] = field(default_factory=list)
    noticed: list[Case] = field(default_factory=list)
    through: int = 0
    wrong: int = 0
    second: Counter[str] = field(default_factory=Counter)
    covert: Counter[str] = field(default_factory=Counter)


def _run(name: str, dealer: int, seed: int = 0, **how: Any) -> Ending:
    build = functools.partial(ALL[name], dealer=dealer)
    inputs = SHAPED.get(name, INPUTS)
    audits = {"everything": name not in PROTOCOLS}
    if Audits.one_in:
        audits = {"everything": True, "audit_one_in": Audits.one_in}
    return run_proved(build, inputs, ring=RING, seed=seed, **audits, **how)


class Audits:
    """One step in so many is audited, as ``--covert`` says; 0: every one is proved."""

    one_in = 0


@functools.lru_cache(256)
def _bodies(name: str, dealer: int, seed: int = 0) -> dict[Message, bytes]:
    """What an honest run sends before its proof."""
    bodies: dict[Message, bytes] = {}

    def note(message: Message, body: bytes) -> bytes:
        bodies[message] = body
        return body

    _run(name, dealer, seed, lie=note, prove=False)
    return bodies


def every_case(seed: int, names: Sequence[str] = tuple(ALL)) -> list[Case]:
    """All cases, shuffled."""
    at = random.Random(f"battery {seed}")
    found = [case for name in names for dealer in range(3) for case in _of_protocol(name, dealer, at)]
    at.shuffle(found)
    return found


def _of_protocol(name: str, dealer: int, at: random.Random) -> Iterator[Case]:
    for liar, count in enumerate(_run(name, dealer, prove=False).sends):
        for number, how in itertools.product(range(count), ERRORS):
            yield Case(name, dealer, liar, how, at.randrange(1 << 16), number=number)
    bodies = _bodies(name, dealer)
    for message, how in itertools.product(bodies, ERRORS[:5]):
        yield Case(name, dealer, message[0], how, at.randrange(1 << 16), message=message)
    for one, other in itertools.combinations(bodies, 2):
        near = abs(one[2] - other[2]) <= 1  # the next one on the link, or the one to the other peer beside it
        if one[0] == other[0] and near and len(bodies[one]) == len(bodies[other]) and bodies[one] != bodies[other]:
            for how in ("exchanged", "repeated"):
                yield Case(name, dealer, one[0], how, 0, message=one, other=other)


def tell(case: Case, *, prove: bool, sent: list[Any] | None = None, watch: Any = None, again: bool = False) -> Ending:
    """A run in which one party tells the case's lie. ``sent``: gets all other messages, where it is on its way;
    ``watch`` is shown all messages, where it is stood by. ``again``: it lies in the second round, too."""
    second = lies_again(case.liar, random.Random(case.seed)) if again else None
    at = random.Random(case.seed)
    if case.message is None:

        def stands_by(number: int, data: torch.Tensor) -> None:
            if number == case.number:
                alter(data, case.how, at)

        how: dict[str, Any] = {"liar": case.liar, "stands_by": stands_by, "lie": watch, "lie_again": second}
        return _run(case.name, case.dealer, case.seed, prove=prove, **how)
    bodies = _bodies(case.name, case.dealer)

    def on_its_way(message: Message, body: bytes) -> bytes:
        if sent is not None and message not in (case.message, case.other):
            sent.append((message, body))
        if case.other is None or case.message is None:
            return altered(body, case.how, at) if message == case.message else body
        if message == case.message and case.how == "exchanged":
            return bodies[case.other]
        return bodies[case.message] if message == case.other else body

    return _run(case.name, case.dealer, prove=prove, lie=on_its_way, lie_again=second)


def judge(case: Case, found: Found) -> None:
    """Tell the lie with the proof and without, and count what came of it."""
    found.cases[f"{case.name} {'stood by' if case.message is None else 'to one peer'}"] += 1
    ending = tell(case, prove=True)
    errors = [ending.errors[p] for p in range(3) if p != case.liar]
    said = [error for error in errors if isinstance(error, ProtocolError)]
    if ending.opened == [None] * 3 and said:
        found.caught += 1
        found.by_proof += any(isinstance(error, ProofFailedError) for error in said)
    elif _is_void(case):
        found.void.append(case)
        return
    else:
        found.undetected.append(case)
    if any(isinstance(error, ProofFailedError) and case.liar not in error.pair for error in said):
        found.misnamed.append(case)
    opened = tell(case, prove=False).opened
    if any(one is None for one in opened):
        found.noticed.append(case)
        return
    found.through += 1
    right = _right(case.name, case.dealer, case.seed if case.message is None else 0)
    found.wrong += not all(torch.equal(a, b) for a, b in zip(opened, right, strict=True))


def judge_second(case: Case, found: Found) -> None:
    """Tell the lie, and count what the second round finds, where the liar goes on in good faith and where not."""
    kind = "stood by" if case.message is None else "to one peer"
    for again in (False, True):
        found.cases[f"{case.name} {kind}"] += 1
        ended = tell(case, prove=True, again=again)
        if misnamed(ended, case.liar):
            found.misnamed.append(case)
        errors = [e for p, e in enumerate(ended.errors) if p != case.liar and isinstance(e, ProofFailedError)]
        named = sum(e.party == case.liar for e in errors)
        cleared = bool(errors) and all(e.finding is not None and len(e.finding.open_to) == 2 for e in errors)
        what = "no proof failed" if not errors else f"named by {named}"
        what += ", the third one cleared" if cleared else ""
        mode = "everything proved" if case.name in WHOLE else "products proved"
        found.second[f"{mode}; {kind}; {'lies again' if again else 'in good faith'}: {what}"] += 1


@functools.lru_cache(4096)
def _drawn(name: str, dealer: int, seed: int) -> tuple[int, ...]:
    """Whom a step of this seed audits."""
    proved = _run(name, dealer, seed).proved[0]
    assert proved is not None
    return audited(proved.drawn, Audits.one_in)


def judge_covert(case: Case, found: Found) -> None:
    """Tell the lie in a step that audits whom its seed draws, and count what came of it."""
    kind = "stood by" if case.message is None else "to one peer"
    found.cases[f"{case.name} {kind}"] += 1
    due = case.liar in _drawn(case.name, case.dealer, case.seed if case.message is None else 0)
    ending = tell(case, prove=True)
    said = [ending.errors[p] for p in range(3) if p != case.liar]
    caught = ending.opened == [None] * 3 and any(isinstance(error, ProtocolError) for error in said)
    if due and not caught:
        (found.void if _is_void(case) else found.undetected).append(case)
        return
    found.caught += caught
    found.covert[f"{kind}; {'audited' if due else 'not audited'}: {'caught' if caught else 'not caught'}"] += 1
    if any(isinstance(error, ProofFailedError) and case.liar not in error.pair for error in said):
        found.misnamed.append(case)


def _is_void(case: Case) -> bool:
    """Whether every message of step and proof but the altered one is what it is in a run without a lie."""
    if case.message is None:
        return _is_void_though_stood_by(case)
    honest: list[Any] = []
    told: list[Any] = []

    def note(message: Message, body: bytes) -> bytes:
        honest.extend([(message, body)] if message not in (case.message, case.other) else [])
        return body

    _run(case.name, case.dealer, lie=note)
    tell(case, prove=True, sent=told)
    return sorted(honest) == sorted(told)


def _is_void_though_stood_by(case: Case) -> bool:
    """The same of what its sender goes on with: one tensor, to one peer or both, and nothing else of the run."""
    sent: list[dict[Message, bytes]] = [{}, {}]

    def noting(into: dict[Message, bytes]) -> Any:
        def note(message: Message, body: bytes) -> bytes:
            into[message] = body
            return body

        return note

    _run(case.name, case.dealer, case.seed, lie=noting(sent[0]))
    tell(case, prove=True, watch=noting(sent[1]))
    return sent[0].keys() == sent[1].keys() and sum(sent[1][m] != body for m, body in sent[0].items()) <= 2


@functools.lru_cache(4096)
def _right(name: str, dealer: int, seed: int) -> list[Any]:
    return _run(name, dealer, seed, prove=False).opened


def _report(found: Found, planned: int, seed: int, shard: str) -> dict[str, Any]:
    lists = ("undetected", "misnamed", "noticed", "void")
    listed = {key: [asdict(case) for case in getattr(found, key)] for key in lists}
    return {
        "seed": seed,
        "shard": shard,
        "planned": planned,
        "cases": sum(found.cases.values()),
        "caught": found.caught,
        "by_proof": found.by_proof,
        "unnoticed_without_proof": found.through,
        "of_them_wrong": found.wrong,
        "second_round": dict(sorted(found.second.items())),
        "covert": dict(sorted(found.covert.items())),
        "by_kind": dict(sorted(found.cases.items())),
        **listed,
    }


COUNTS = ("planned", "cases", "caught", "by_proof", "unnoticed_without_proof", "of_them_wrong")


def merged(reports: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """What several shards found, by the names of their files: sums, every lie that went wrong, how far each came."""
    every = list(reports.values())
    found: dict[str, Any] = {key: sum(one[key] for one in every) for key in COUNTS}
    found |= {key: sum(len(one[key]) for one in every) for key in ("void", "noticed")}
    for key in ("second_round", "covert", "by_kind"):
        found[key] = dict(sorted(sum((Counter(one[key]) for one in every), Counter[str]()).items()))
    found |= {key: [case for one in every for case in one[key]] for key in ("undetected", "misnamed")}
    told = {n: (f"seed {one['seed']}, {one['shard']}: " if "shard" in one else "") for n, one in reports.items()}
    return found | {"shards": {n: f"{told[n]}{one['cases']} of {one['planned']}" for n, one in reports.items()}}


def _write(path: Path, report: dict[str, Any]) -> None:
    """Whole or not at all: a shard may be ended at any time."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(json.dumps(report, indent=1))
    beside.replace(path)


def main(words: list[str]) -> int:
    """Run a shard, or merge what several wrote; 1 if a lie went undetected or an honest pair was named."""
    parser = argparse.ArgumentParser(description="tell every lie of the battery")
    parser.add_argument("--shard", default="0/1", help="K/N: the cases whose place modulo N is K")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=list(ALL), choices=list(ALL), help="these protocols alone")
    parser.add_argument("--most", type=int, default=0, help="end after so many cases")
    parser.add_argument("--second", action="store_true", help="only what the second round finds, twice for each case")
    parser.add_argument("--covert", type=int, default=0, metavar="N", help="only what audits of one step in N find")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE", help="only add up what shards wrote")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args(words)
    if asked.merge:
        whole = merged({path.name: json.loads(path.read_text()) for path in asked.merge})
        _write(asked.out, whole)
        return 1 if whole["undetected"] or whole["misnamed"] else 0
    torch.set_num_threads(1)
    shard, shards = (int(part) for part in asked.shard.split("/"))
    mine = every_case(asked.seed, asked.only)[shard::shards]
    found, tells = Found(), judge_second if asked.second else judge
    if asked.covert:
        Audits.one_in, tells = asked.covert, judge_covert
    for number, case in enumerate(mine[: asked.most or None], 1):
        tells(case, found)
        if number % 25 == 0 or number == len(mine):
            _write(asked.out, _report(found, len(mine), asked.seed, asked.shard))
    _write(asked.out, _report(found, len(mine), asked.seed, asked.shard))
    return 1 if found.undetected or found.misnamed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
