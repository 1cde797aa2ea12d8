"""Under ``verify: covert`` a lie is caught in the steps that are audited, and nobody knows before which those are."""

from __future__ import annotations

import functools
import hashlib
import json
import random
from pathlib import Path
from typing import Any

import battery
import pytest
import torch
from proof_kit import OF_A_PROOF, PROTOCOLS, WHOLE, Ending, Message, alter, altered, misnamed, normal, run_proved

from uvcc_engine import simulate
from uvcc_engine.contract.errors import PeerLostError, ProofFailedError, ProtocolError
from uvcc_engine.contract.job.proof_mode import Proving, is_audited
from uvcc_engine.mpc.foundation import local
from uvcc_engine.mpc.foundation.claim_ledger import ClaimLedger
from uvcc_engine.mpc.foundation.local import LocalPlanes
from uvcc_engine.mpc.foundation.prg import OWN, PairKeys
from uvcc_engine.mpc.foundation.share import share_of, split
from uvcc_engine.proofs import settling, verdicts
from uvcc_engine.proofs.audit_draws import audited, drawn
from uvcc_engine.proofs.challenges import SEED_WORDS
from uvcc_engine.proofs.galois_ring import GaloisRing
from uvcc_engine.proofs.step_proof import prove
from uvcc_engine.transcript.formats import kinds

INPUTS = (normal(1, 3, 4), normal(2, 4, 3))
ALL = PROTOCOLS | WHOLE
RING = GaloisRing(20)


def _run(name: str = "elementwise", seed: int = 0, one_in: int = 2, **how: Any) -> Ending:
    build = functools.partial(ALL[name], dealer=1)
    inputs = (normal(1, 3, 3), normal(2, 1, 3)) if name == "chosen" else INPUTS
    return run_proved(build, inputs, ring=RING, seed=seed, everything=True, audit_one_in=one_in, **how)


@functools.cache
def _audits(name: str, seed: int, one_in: int = 2) -> tuple[int, ...]:
    """Whom an honest step of this seed audits."""
    found = _run(name, seed, one_in)
    assert found.errors == [None] * 3
    one, *others = (p.drawn for p in found.proved if p is not None)
    assert others == [one, one]
    assert len(set(one)) == 3
    return audited(one, one_in)


def _lie(name: str, seed: int, liar: int, number: int, how: str = "one", **more: Any) -> Ending:
    at = random.Random(seed)

    def lie(sent: int, data: torch.Tensor) -> None:
        if sent == number:
            alter(data, how, at)

    return _run(name, seed, liar=liar, stands_by=lie, **more)


def _opened_wrong(found: Ending, name: str, seed: int) -> bool:
    right, first = _run(name, seed).opened[0], found.opened[0]
    assert right is not None
    if first is None or any(o is None or not torch.equal(o, first) for o in found.opened):
        return False
    return not torch.equal(first, right)


@pytest.mark.parametrize("name", ["elementwise", "matmul", pytest.param("relu", marks=pytest.mark.ci(__file__))])
def test_a_lie_in_an_audited_step_is_always_caught_and_in_another_one_never(name: str) -> None:
    seen, liar, wrong = {True: 0, False: 0}, 1, 0
    for seed in range(8):
        due = liar in _audits(name, seed)
        found = _lie(name, seed, liar, 7 if name == "relu" else 0, "top")
        seen[due] += 1
        if due:
            assert found.opened == [None] * 3, seed
            assert any(isinstance(found.errors[p], ProofFailedError) for p in (0, 2))
            assert misnamed(found, liar) == []
        else:
            assert found.errors == [None] * 3, seed
            wrong += _opened_wrong(found, name, seed)
    assert min(seen.values()) >= 2
    assert wrong >= 2, "what is opened in a step that is not audited may be wrong"


@pytest.mark.ci(__file__)
def test_lies_are_caught_at_about_the_rate() -> None:
    """A sample of the battery's lies, one in three audited: with this many, 5 deviations are a quarter of them."""
    name, one_in, at = "chosen", 3, random.Random(7)
    sends, tries, caught, expected = _run(name).sends, 150, 0, 0
    for seed in range(tries):
        liar = at.randrange(3)
        how = at.choice(("one", "top", "random", "bit"))
        found = _lie(name, seed, liar, at.randrange(sends[liar]), how, one_in=one_in)
        expected += liar in _audits(name, seed, one_in)
        caught += found.opened == [None] * 3
    assert caught == expected
    deviation = (tries * (1 / 3) * (2 / 3)) ** 0.5
    assert abs(caught - tries / one_in) < 5 * deviation < tries / 4


def test_the_battery_finds_that_lies_in_audited_steps_are_caught_and_counts_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its option for audits, on a sample; one of its lies that a step let through although it was due would end it."""
    monkeypatch.setattr(battery.Audits, "one_in", 0)
    words = ["--covert", "2", "--only", "chosen", "--most", "24", "--out", str(tmp_path / "found.json")]
    assert battery.main(words) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["cases"] == 24
    assert sum(found["covert"].values()) + len(found["void"]) == 24
    assert {"stood by; audited: caught", "stood by; not audited: not caught"} <= found["covert"].keys()
    monkeypatch.setattr(settling, "found_true", lambda *args: True)
    monkeypatch.setattr(verdicts, "failure_of", lambda *args: None)
    monkeypatch.setattr(settling, "failure_of", lambda *args: None)
    monkeypatch.setattr(verdicts, "found_true", lambda *args: True)
    fewer = [*words[:4], "--most", "8", *words[6:]]
    assert battery.main(fewer) == 1, "parties that take no notice of a proof"


def test_what_is_drawn_is_as_rare_as_the_rate_says() -> None:
    seed, tries = torch.zeros(SEED_WORDS, dtype=torch.int64), 4000
    for one_in in (2, 10, 100):
        count = 0
        for number in range(tries):
            seed[0] = number
            count += is_audited(drawn(seed, number % 3), one_in)
        assert abs(count - tries / one_in) < 4 * (tries / one_in) ** 0.5
    assert is_audited(0, 100)
    assert is_audited((1 << 64) // 10, 10), "never rarer than the rate"
    assert not is_audited((1 << 64) // 10 + 1, 10)


def _keys(changed: str) -> list[PairKeys]:
    def key(what: str) -> bytes:
        return hashlib.sha256(f"{what} {'changed' if what == changed else ''}".encode()).digest()

    shared, own = [key(f"component {c}") for c in range(3)], [key(f"own {p}") for p in range(3)]
    return [PairKeys(prev=shared[p], next=shared[(p + 1) % 3], own=own[p]) for p in range(3)]


def _drawn_with(changed: str) -> tuple[int, ...]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "rehearsal_keys", lambda seed: _keys(changed))
        proved = _run().proved[0]
    assert proved is not None
    return proved.drawn


def test_what_decides_an_audit_comes_from_the_one_key_that_the_prover_lacks() -> None:
    """All that a party has may be another, and its draw stays as it was; of what it lacks all of it depends."""
    before = _drawn_with("")
    for q, (runtime, number) in enumerate(zip(LocalPlanes(0).runtimes, before, strict=True)):
        assert set(runtime.streams) == {q, (q + 1) % 3, OWN}, "the prover holds its verifiers' stream"
        mine = (f"component {q}", f"component {(q + 1) % 3}", *(f"own {p}" for p in range(3)))
        assert all(_drawn_with(one)[q] == number for one in mine)
        assert _drawn_with(f"component {(q + 2) % 3}")[q] != number


def test_one_half_of_a_seed_says_nothing_of_the_draw() -> None:
    """Each of the two that the prover is told can, with some other half, draw anything."""
    at = torch.Generator().manual_seed(3)
    halves = torch.randint(-(2**63), 2**63 - 1, (40, SEED_WORDS // 2), generator=at)
    for fixed in halves[:4]:
        for seeds in ([torch.cat([fixed, h]) for h in halves], [torch.cat([h, fixed]) for h in halves]):
            found = [is_audited(drawn(seed, 1), 2) for seed in seeds]
            assert 8 < sum(found) < 32


def test_a_verifier_tells_its_half_after_it_has_every_message_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[str, int, int, int]] = []
    send, recv = local.LocalPlane.send, local.LocalPlane.recv

    def sent(self: local.LocalPlane, dst: int, tag: Any, payload: Any) -> None:
        order.append(("sent", self.party, dst, tag.kind))
        send(self, dst, tag, payload)

    def received(self: local.LocalPlane, src: int, tag: Any) -> memoryview:
        order.append(("received", src, self.party, tag.kind))
        return recv(self, src, tag)

    monkeypatch.setattr(local.LocalPlane, "send", sent)
    monkeypatch.setattr(local.LocalPlane, "recv", received)
    assert _run("relu").errors == [None] * 3
    of_step = (kinds.RESHARE, kinds.DEALER)
    for q in range(3):
        for verifier in ((q + 1) % 3, (q + 2) % 3):
            told = next(
                i
                for i, one in enumerate(order)
                if one[:3] == ("sent", verifier, q) and one[3] not in (*of_step, kinds.OPEN)
            )
            after = [one for one in order[told:] if one[3] in of_step and one[1] == q]
            assert ("received", q, verifier, order[told][3]) not in order[:told]
            assert not [one for one in after if one[2] == verifier], "a message of the step that the coins came before"


@pytest.mark.parametrize("half", [True, False])
def test_a_false_half_or_draw_ends_the_step_and_names_no_honest_party(half: bool) -> None:
    """Whether it makes an honest prover believe that it is audited or that it is not. Halves come first in a frame."""
    for seed in range(6):
        liar, hit = seed % 3, list[Message]()

        def lie(message: Message, body: bytes, liar: int = liar, hit: list[Message] = hit) -> bytes:
            if message[0] != liar or hit or (message[3] == kinds.AUDIT) == half:
                return body
            if message[3] not in OF_A_PROOF:
                return body
            hit.append(message)
            return altered(body[:16], "bit", random.Random(message[4])) + body[16:]

        found = _run(seed=seed, lie=lie)
        assert hit
        told = hit[0][1]
        error = found.errors[told]
        assert isinstance(error, ProofFailedError)
        assert "do not agree on whom" in error.what
        assert liar in error.pair
        due = _audits("elementwise", seed)
        assert [p for p in range(3) if f"party {p} could know that step" in error.what] == [p for p in due if p != told]
        assert found.opened[told] is None
        for party in {0, 1, 2} - {liar}:
            other = found.errors[party]
            assert other is None or other.party in (-1, liar)
            assert not isinstance(other, ProofFailedError) or liar in other.pair


def test_who_withholds_its_proof_after_its_coins_is_named_with_that() -> None:
    name = "matmul"
    seed, q = next((s, q) for s in range(20) for q in range(3) if q in _audits(name, s))
    cut = next(m for m in _run(name, seed).proof if m[0] == q and m[3] == kinds.PROOF and m[4] > 32)

    def lie(message: Message, body: bytes) -> bytes:
        return body[:-8] if message == cut else body

    found = _run(name, seed, lie=lie).errors[cut[1]]
    assert isinstance(found, ProtocolError)
    assert found.party == q


@pytest.mark.parametrize(("party", "said"), [(1, True), (2, False)])
def test_leaving_in_an_audit_is_said_of_whoever_was_drawn(party: int, said: bool) -> None:
    runtime = LocalPlanes(0).runtimes[0]
    runtime.ledger = ClaimLedger(everything=True, audit_one_in=2)
    runtime.ledger.audits = (1,)

    def gone(steps: Any) -> Any:
        steps.close()
        raise PeerLostError(f"party {party} is silent", party=party)

    runtime.run = gone  # type: ignore[method-assign]
    with pytest.raises(PeerLostError) as found:
        prove(runtime)
    assert (f"party {party} could know that step" in found.value.what) == said
    assert str(found.value) == found.value.what


@pytest.mark.parametrize("number", [0, 1], ids=["its halves of the others' coins", "its word on whom they draw"])
def test_who_leaves_with_its_coins_in_hand_is_named_with_that_before_it_has_said_who_was_drawn(number: int) -> None:
    """It may have heard both halves of its own seed before it owes anything more."""
    said = set[bool]()
    for seed, q in ((s, s % 3) for s in range(8)):
        sent: list[int] = []

        def cut(src: int, dst: int, tag: Any, body: bytes, q: int = q, sent: list[int] = sent) -> bytes:
            if (src, dst) != (q, (q + 1) % 3) or tag.kind not in OF_A_PROOF:
                return body
            sent.append(tag.kind)
            return body[:-8] if len(sent) == number + 1 else body

        planes = LocalPlanes(seed, tamper=cut)
        parts = [split(x, 16, random.Random(seed).randbytes) for x in INPUTS]

        def body(rt: Any, parts: Any = parts) -> None:
            rt.ledger = ClaimLedger(everything=True, audit_one_in=2)
            rt.run(ALL["matmul"](rt, *[share_of(x, rt.party, 16) for x in parts], dealer=1))
            prove(rt)

        with pytest.raises(ProtocolError) as found:
            planes.run_three(body)
        assert found.value.party == q
        said.add(noted := f"party {q} could know that step" in found.value.what)
        assert noted == (q in _audits("matmul", seed))
    assert said == {True, False}


def test_two_honest_parties_copies_are_not_taken_to_agree() -> None:
    """An earlier step may have been false, so the second round uses only what a party says of itself."""
    assert ClaimLedger.of(Proving.of("proofs")).copies_agree
    assert not ClaimLedger.of(Proving.of("covert")).copies_agree


def _data() -> tuple[Any, Any]:
    x = torch.randn(40, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64).numpy()
    return x, (x[:, 0] > 0).astype(int)


def _fit(**more: Any) -> simulate.SimulatedFit:
    return simulate.fit([{"linear": 4}, "relu", "linear"], *_data(), **({"steps": 4, "batch": 8, "seed": 3} | more))


@pytest.mark.ci(__file__)
def test_a_training_with_audits_learns_the_same_and_audits_the_same_steps_again() -> None:
    plain, one, two = _fit(), _fit(verify="covert", audit_one_in=2), _fit(verify="covert", audit_one_in=2)
    assert one.audited == two.audited
    assert len(one.audited) == 5
    assert {len(of_step) for of_step in one.audited} >= {1, 2}
    assert torch.allclose(torch.tensor(plain.losses), torch.tensor(one.losses), atol=2.0**-9)
    rare = _fit(verify="covert", audit_one_in=100)
    assert sum(map(len, rare.audited)) < sum(map(len, one.audited))
    assert rare.bytes_sent < one.bytes_sent
    assert plain.audited == ()


def test_another_attempt_draws_anew() -> None:
    """Who has learned of its audit and leaves does not know those of the next attempt, which begins anew."""

    def first_draws(attempt: int) -> tuple[int, ...]:
        planes = LocalPlanes(3)
        keys = local.rehearsal_keys(3)
        return tuple(
            drawn(
                local.Runtime(p, planes.planes[p], keys[p], hashlib.sha256(b"sid").digest(), attempt)
                .draws()
                .ring(p, SEED_WORDS),
                (p + 1) % 3,
            )
            for p in range(3)
        )

    assert first_draws(0) == first_draws(0)
    assert not set(first_draws(0)) & set(first_draws(1))


def test_what_shards_of_the_battery_found_adds_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lies = [battery.Case("elementwise", 0, 1, how, 3, number=0) for how in ("one", "top", "all")]
    monkeypatch.setattr(battery, "every_case", lambda seed, names: lies)
    files = [tmp_path / f"{shard}.json" for shard in range(2)]
    for shard, file in enumerate(files):
        assert battery.main(["--shard", f"{shard}/2", "--out", str(file)]) == 0
    merge = ["--merge", *map(str, files), "--out", str(tmp_path / "whole.json")]
    assert battery.main(merge) == 0
    whole = json.loads((tmp_path / "whole.json").read_text())
    assert whole["by_kind"] == {"elementwise stood by": 3}
    assert [whole[key] for key in ("planned", "cases", "caught", "by_proof")] == [3] * 4
    assert whole["unnoticed_without_proof"] == 3
    assert whole["shards"] == {"0.json": "seed 0, 0/2: 2 of 2", "1.json": "seed 0, 1/2: 1 of 1"}
    files[1].write_text(json.dumps(json.loads(files[1].read_text()) | {"undetected": [{"name": "elementwise"}]}))
    assert battery.main(merge) == 1
    assert json.loads((tmp_path / "whole.json").read_text())["undetected"] == [{"name": "elementwise"}]
