"""A long step is proved in instalments: the same numbers come out, every lie is found, and memory is bounded."""

from __future__ import annotations

import functools
import hashlib
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from proof_kit import LEARNED, PROTOCOLS, WHOLE, Ending, Message, alter, altered, judge, normal, run_proved
from replica_kit import Outcome, job_of, rows_of, train

from uvcc_engine import simulate
from uvcc_engine.bench.launch import fleet as fleets
from uvcc_engine.bench.launch.fleet import Fleet, Forker
from uvcc_engine.contract.errors import ProofFailedError
from uvcc_engine.contract.job.topology import Coord, Topology
from uvcc_engine.mpc.foundation.claim_ledger import ClaimLedger, ProductNotes, ProvedStep
from uvcc_engine.proofs import instalments, step_proof
from uvcc_engine.proofs.instalments import STREAM
from uvcc_engine.transcript.leaves import leaf_file
from uvcc_engine.transcript.leaves.leaf import Leaf

SHAPED = {
    "chosen": (normal(1, 3, 3), normal(2, 1, 3)),
    "patches": (normal(1, 8, 3), normal(2, 3, 4)),
    "batched": (normal(1, 2, 2, 3, 4), normal(2, 2, 2, 4, 3)),
}
INPUTS = (normal(1, 3, 4), normal(2, 4, 3))
ALL = PROTOCOLS | WHOLE | LEARNED
NET: list[Any] = [{"linear": 4}, "relu", "linear"]
TWO = Topology(2)


def _run(name: str, bound: int, **how: Any) -> Ending:
    build = functools.partial(ALL[name], dealer=len(name) % 3)
    return run_proved(build, SHAPED.get(name, INPUTS), everything=name not in PROTOCOLS, bound=bound, **how)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(one, marks=() if n % 4 == 0 or one == "relu" else pytest.mark.ci(__file__))
        for n, one in enumerate(ALL)
    ],
)
def test_a_step_that_is_proved_after_every_round_opens_what_one_proved_at_its_end_does(name: str) -> None:
    whole, parts = _run(name, 0), _run(name, 1)
    assert whole.errors == parts.errors == [None] * 3
    for a, b in zip(whole.opened, parts.opened, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b), "bit for bit"
    first = parts.proved[0]
    assert first is not None
    assert all(one == first for one in parts.proved), "the three parties proved something else each"
    (wanted,) = {one.claims for one in whole.proved if one is not None}
    assert first.claims == wanted, "a claim was left out, or proved twice"
    if name not in {*PROTOCOLS, "public layer"}:  # of one product there is nothing before its end
        assert len(parts.proof) > len(whole.proof), "there was no instalment"


@pytest.mark.parametrize(
    "name", ["relu", *(pytest.param(n, marks=pytest.mark.ci(__file__)) for n in ("adam", "argmax", "normal"))]
)
def test_a_lie_in_any_message_of_a_step_in_instalments_is_found(name: str) -> None:
    at = random.Random(name)
    counts = _run(name, 1).sends
    every = [(liar, number) for liar, count in enumerate(counts) for number in range(count)]
    for liar, number in at.sample(every, min(len(every), 9)):

        def lie(sent: int, data: torch.Tensor, number: int = number) -> None:
            if sent == number:
                alter(data, "one", at)  # the lowest bit counts in every message, also in numbers of few bits

        judge(_run(name, 1, liar=liar, stands_by=lie), liar)


def test_a_lie_in_an_instalment_itself_is_found_and_ends_the_step_where_it_stands() -> None:
    whole = _run("relu", 1)
    at = random.Random(3)
    for chosen in at.sample(whole.proof, 8):

        def lie(message: Message, body: bytes, chosen: Message = chosen) -> bytes:
            return altered(body, "bit", at) if message == chosen else body

        judge(_run("relu", 1, lie=lie), chosen[0])
    early = min(whole.proof, key=lambda message: message[2])

    def first(message: Message, body: bytes) -> bytes:
        return altered(body, "bit", at) if message == early else body

    ended = _run("relu", 1, lie=first)
    assert len(ended.step) < len(whole.step), "the step went on behind a proof that had failed"


def _fit(**more: Any) -> simulate.SimulatedFit:
    x = torch.randn(40, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64).numpy()
    return simulate.fit(NET, x, (x[:, 0] > 0).astype(int), **({"steps": 2, "batch": 8, "seed": 3} | more))


class _Held:
    """What ledgers kept of settled claims at most, and how many instalments there were."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most = self.instalments = 0
        claim, settle, take = ClaimLedger.claim, ClaimLedger.settle, ClaimLedger.take_settled

        def claimed(ledger: ClaimLedger, *claims: Any) -> None:
            claim(ledger, *claims)
            self.most = max(self.most, ledger.settled_words)

        def settled(ledger: ClaimLedger, notes: ProductNotes) -> None:
            settle(ledger, notes)
            self.most = max(self.most, ledger.settled_words)

        def taken(ledger: ClaimLedger) -> ClaimLedger:
            self.instalments += 1
            return take(ledger)

        monkeypatch.setattr(ClaimLedger, "claim", claimed)
        monkeypatch.setattr(ClaimLedger, "settle", settled)
        monkeypatch.setattr(ClaimLedger, "take_settled", taken)


def _bounded(monkeypatch: pytest.MonkeyPatch, bound: int) -> None:
    monkeypatch.setattr(instalments, "BOUND", bound)
    monkeypatch.setattr(instalments, "LEAST", 1)


@pytest.mark.parametrize("verify", [pytest.param("products", marks=pytest.mark.ci(__file__)), "proofs"])
def test_a_training_keeps_no_more_than_its_bound_and_what_a_round_adds(
    verify: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = _Held(monkeypatch)
    whole = _fit(verify=verify)
    assert held.instalments == 0, "a small step is proved at its end"
    before, held.most = held.most, 0
    _bounded(monkeypatch, before // 10)
    parts = _fit(verify=verify)
    assert held.instalments > 3 * 6
    assert held.most < before // 2
    assert np.allclose(whole.losses, parts.losses, atol=2.0**-9)
    for a, b in zip(whole.weights, parts.weights, strict=True):
        assert np.allclose(a, b, atol=2.0**-9)
    assert parts.rounds > whole.rounds


def test_where_steps_are_audited_there_are_no_instalments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who was told in the middle of a step that nobody looks could lie in the rest of it."""
    held = _Held(monkeypatch)
    _bounded(monkeypatch, 1)
    _fit(verify="covert", steps=1)
    assert held.instalments == 0


SPLIT: dict[str, Any] = {"verify": "proofs", "steps": 1, "batch": 4, "reveal": ("loss",)}


@pytest.mark.parametrize(
    "size", [Topology(2, 1, 1, 2), pytest.param(Topology(1, 2), marks=pytest.mark.ci(__file__))], ids=str
)
def test_workers_of_a_party_prove_in_instalments_and_learn_the_same(
    size: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, job = _Held(monkeypatch), job_of(**SPLIT)
    whole = train(job, size)
    before = held.most
    _bounded(monkeypatch, before // 2)
    parts = train(job, size)
    assert held.instalments >= 3 * size.workers_per_party
    for c, one in whole.workers.items():
        other = parts.workers[c]
        assert one.error is None
        assert other.error is None
        assert one.losses == other.losses
        assert one.claims == other.claims
        assert all(torch.equal(one.state[name], other.state[name]) for name in one.state)


def test_tensor_ranks_prove_at_the_end_of_a_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """They meet inside a pass, where one would wait for the proof of claims that the other has not."""
    held = _Held(monkeypatch)
    _bounded(monkeypatch, 1)
    found = train(job_of(**SPLIT), Topology(1, 1, 2))
    assert set(found.errors.values()) == {None}
    assert held.instalments == 0


def _failed(found: Outcome, liar: Coord) -> None:
    assert not found.opened, "something was opened behind a proof that had failed"
    for c, error in found.errors.items():
        if c.party != liar.party:
            assert isinstance(error, ProofFailedError), (c, error)
            assert liar.party in error.pair


def test_a_lie_that_an_instalment_of_one_replica_finds_ends_both_at_the_end_of_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its sister is told why, and not that a worker is gone."""
    _bounded(monkeypatch, 1)
    liar, told = Coord(1, 1, 0, 0), []

    def lie(epoch: int, number: int, data: torch.Tensor) -> None:
        if number % 1000 == 1 and not told:
            told.append(number)
            data.view(-1)[0] ^= 1

    _failed(train(job_of(**SPLIT), TWO, liar=liar, stands_by=lie), liar)
    assert told


def test_what_the_step_before_owes_is_heard_before_an_instalment(monkeypatch: pytest.MonkeyPatch) -> None:
    """By one worker; workers of a party hear it together at a step's end, and have no instalment before."""
    _bounded(monkeypatch, 1)
    order: list[str] = []
    taken = ClaimLedger.take_settled

    def take(ledger: ClaimLedger) -> ClaimLedger:
        assert not ledger.owes, "an instalment before the verdicts of the step before were heard"
        order.append("instalment")
        return taken(ledger)

    monkeypatch.setattr(ClaimLedger, "take_settled", take)
    job = job_of(**SPLIT | {"steps": 3, "loss_every": 3})
    for size in (Topology(1), TWO):
        order.clear()
        found = train(job, size, defers=True)
        assert set(found.errors.values()) == {None}
        assert order


@pytest.fixture(scope="module")
def forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forker]:
    bounding = [sys.executable, str(Path(__file__).with_name("lying_forker.py"))]
    made = Forker(tmp_path_factory.mktemp("forker"), within=bounding)
    yield made
    made.close()


@pytest.mark.ci(__file__)
def test_a_run_of_real_workers_in_instalments_is_verified_and_goes_on_after_a_crash(
    forker: Forker, tmp_path: Path
) -> None:
    """Resumed word for word: what was sent of an instalment before the crash is sent again, and is the same."""
    job = job_of(["linear"], steps=3, verify="proofs", checkpoint_every=1, reveal=("loss", "accuracy"))

    def run(name: str, lie: str = "", **how: Any) -> tuple[Fleet, set[int]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fleets, "dataset_for", rows_of)
            made = Fleet(tmp_path / name, forker, job, TWO) if name not in kept else kept[name]
        kept[name] = made
        made.env = {"BOUND": "1"} | ({"LIE": f"p1r1s0t0:{lie}"} if lie else {})
        made.launch(**how)
        return made, set(made.wait().values())

    kept: dict[str, Fleet] = {}
    whole, codes = run("whole")
    assert codes == {0}, whole.logs()
    crashed, codes = run("crashed", "dies_in_an_epoch")
    assert 0 not in codes
    crashed, codes = run("crashed", resume=True)
    assert codes == {0}, crashed.logs()
    found, wanted = crashed.verified(tmp_path / "a"), whole.verified(tmp_path / "b")
    assert (found.run_root, found.claims) == (wanted.run_root, wanted.claims)
    leaves = tmp_path / "b" / "0" / "transcript_p0r0s0t0" / leaf_file.LEAVES
    streams = {Leaf.unpack(r).stream for f, b in leaf_file.blocks(leaves) for r in leaf_file.records(f, b)}
    assert any(stream & STREAM for stream in streams)


class _Begun(Exception):
    """An instalment would begin."""


def _due(ledger: ClaimLedger, *, bound: int = 10, stream: int = 0) -> bool | None:
    """Whether an instalment would begin now; None where there are none at all."""

    def beside(stream: int) -> None:
        raise _Begun

    rt: Any = SimpleNamespace(ledger=ledger, stream=stream, epoch=1, beside=beside, instalment=None)
    instalments.in_instalments(rt, ledger, bound)
    if rt.instalment is None:
        return None
    try:
        assert rt.instalment() is None
    except _Begun:
        return True
    return False


def test_an_instalment_is_due_at_its_bound_and_not_before_what_all_workers_of_a_party_have_to_hear() -> None:
    for sisters in (False, True):
        ledger, heard = ClaimLedger(sisters=sisters), []
        ledger.settled_words = 9
        assert _due(ledger) is False
        ledger.settled_words = 10
        assert _due(ledger) is True, "all parties count the same words, and the bound is one of them"
        ledger.owes, ledger.unheard = True, lambda heard=heard: heard.append(1)  # type: ignore[misc]
        assert _due(ledger) is not sisters
        assert len(heard) == (not sisters), "one worker heard alone what its sisters hear together"
        ledger.owes, ledger.failed = False, ProofFailedError("x", "")
        assert _due(ledger) is False
    ledger = ClaimLedger(audit_one_in=4)
    assert _due(ledger) is None
    assert _due(ClaimLedger(), stream=STREAM) is None
    assert _due(ClaimLedger(), stream=STREAM - 1) is False


def test_streams_share_the_bound_and_none_has_less_than_a_proof_is_worth() -> None:
    shares = [instalments.share_of_bound(n) for n in (1, 2, 64, 65, 10_000)]
    assert shares == [instalments.BOUND, instalments.BOUND // 2, *[instalments.LEAST] * 3]


def test_a_step_without_instalments_is_stated_as_it_always_was() -> None:
    one = ProvedStep(3, (1, 2, 3), b"d" * 32, b"c" * 32, (1, 2, 3))
    assert step_proof.in_all([one]) is one
    assert step_proof.in_all([]) == step_proof.NOTHING_PROVED
    both = step_proof.in_all([one, one])
    assert (both.claims, both.entries) == (6, (2, 4, 6))
    assert both.digest == hashlib.sha256(b"UVCC_INSTALMENTS_V1" + 2 * one.digest).digest()
    assert both.coins == hashlib.sha256(b"UVCC_INSTALMENTS_V1" + 2 * one.coins).digest()
    page = Path(__file__).parents[3] / "docs" / "specifications" / "evidence.md"
    assert 'are each SHA("UVCC_INSTALMENTS_V1" || those of the' in page.read_text()


def test_the_manual_says_from_what_size_on_a_step_is_proved_in_instalments() -> None:
    docs = Path(__file__).parents[3] / "docs"
    bound = f"{instalments.BOUND * 8 >> 20} MiB"
    assert f"from {bound} a worker on it is proved in instalments" in (docs / "tutorials" / "own-table.md").read_text()
    assert bound in (docs / "security" / "arguments.md").read_text()
