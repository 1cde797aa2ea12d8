"""Real workers under ``verify: covert``: verified in words that hold, caught where they are audited and only there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from private_kit import OWNER, Fleet, Zygote
from private_liars import LIMITS
from test_private_proofs import JOB as PROVED
from test_private_proofs import LIAR, _collected, _fleet, _run, _shared

from uvcc_engine.contract.errors import ConfigError, UnreadableError, VerificationError
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.proof_mode import is_audited
from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.owner import program_form
from uvcc_engine.owner.audit import audit
from uvcc_engine.owner.client import write_shared
from uvcc_engine.proofs.audit_draws import audited
from uvcc_engine.sharding.validation import fit_model
from uvcc_engine.transcript.formats import kinds
from uvcc_engine.transcript.leaves import leaf_file
from uvcc_engine.transcript.leaves.leaf import SENT, Leaf
from uvcc_engine.transcript.proof import cross_signatures, standalone_verify
from uvcc_engine.transcript.proof.bundle import read_bundle
from uvcc_engine.transcript.proof.verifier import verify
from uvcc_engine.transcript.signed.statements import RootStatement, Verdict

EPOCH = 2  # in which the liar lies
JOB = replace(PROVED, verify="covert", audit_one_in=2, steps=4, reveal=("loss", "accuracy", "seeds"))


@pytest.fixture(scope="module")
def whole(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    fleet = _fleet(tmp_path_factory.mktemp("whole"), zygote, JOB)
    assert _run(fleet, zygote) == [0, 0, 0], [fleet.exit(p) for p in range(3)]
    return fleet


@pytest.fixture(scope="module")
def bundle(whole: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _collected(whole, tmp_path_factory.mktemp("bundle"))


def _verdicts(bundle: Path) -> list[Verdict]:
    found = read_bundle(bundle / "proof_bundle.json", lambda policy: True)
    stated = [[s.proved for _, s in w.roots] for w in found.workers]
    assert stated[0] == stated[1] == stated[2]
    return [v for v in stated[0] if v is not None]


def test_both_verifiers_say_how_many_steps_were_audited_and_never_that_all_were_proved(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    certificate = verify(bundle, allowed_signers=bundle / "allowed_signers")
    verdicts = _verdicts(bundle)
    drawn = [number for v in verdicts for number in v.drawn]
    count = sum(is_audited(number, 2) for number in drawn)
    assert len(drawn) == 3 * (JOB.steps + 1)
    assert 0 < count < len(drawn)
    assert (certificate.word, certificate.verify) == ("VERIFIED", "covert")
    assert (certificate.audited, certificate.drawn) == (count, len(drawn))
    text = certificate.text()
    assert f"{count} of {len(drawn)} domains' steps were drawn for an audit" in text
    assert "caught with a chance of 1 in 2" in text
    assert "not proved: every step that is not audited" in text
    words = [str(bundle / "proof_bundle.json"), "--allowed-signers", str(bundle / "allowed_signers")]
    assert standalone_verify.main(words) == 0
    alone = capsys.readouterr().out
    assert f"{count} of {len(drawn)} domains' steps were drawn for an audit (1 in 2 on average)" in alone
    assert "not proved: every other step" in alone
    for said in (text, alone):
        assert "every message between" not in said
        assert "every product" not in said


def test_the_transcript_has_the_draws_of_every_epoch_and_proofs_of_those_alone_that_were_drawn(bundle: Path) -> None:
    verdicts = _verdicts(bundle)
    for party in range(3):
        for file, block in leaf_file.blocks(bundle / f"p{party}r0" / f"transcript_p{party}r0s0t0" / leaf_file.LEAVES):
            leaves = [Leaf.unpack(record) for record in leaf_file.records(file, block)]
            assert sum(one.kind == kinds.AUDIT for one in leaves) == 4  # one to and one from each peer
            judge = (party + 1) % 3
            sent = [one for one in leaves if one.kind == kinds.PROOF and (one.direction, one.dst) == (SENT, judge)]
            long = [one for one in sent if one.size > 64]
            first = is_audited(verdicts[block.epoch].drawn[(party + 2) % 3], 2)  # whose first verifier it is
            assert bool(long) == (is_audited(verdicts[block.epoch].drawn[party], 2)) or first


def test_the_owner_who_gets_the_seeds_replays_what_was_audited_and_what_not(whole: Fleet, tmp_path: Path) -> None:
    write_shared(_shared(JOB), tmp_path / "sealed")
    replayed = audit(whole.folder, OWNER, tmp_path / "sealed", whole.home(0) / "policy.json")
    assert (replayed.parties, replayed.epochs) == ((), JOB.steps + 1)


def test_a_program_s_form_is_refused_by_name_since_the_policy_does_not_tell_who_proves(bundle: Path) -> None:
    with pytest.raises(ConfigError, match="'covert' has follows from what it drew for audits"):
        program_form.check(bundle)


@pytest.mark.parametrize(
    ("alter", "words"),
    [
        (lambda s: s["proved"].pop("drawn"), "how many draws for audits epoch 1"),
        (lambda s: s["proved"].update(drawn="0" * 48), "what was proved in epoch 1"),
    ],
)
def test_draws_that_lack_or_are_others_than_the_peers_signed_are_refused(bundle: Path, alter: Any, words: str) -> None:
    good = read_bundle(bundle / "proof_bundle.json", lambda policy: True)
    workers = list(good.workers)
    for number in range(3) if "how many" in words else [1]:
        signed, _ = workers[number].roots[1]
        changed = json.loads(canonical(signed.statement))
        alter(changed)
        false = replace(signed, statement=changed), RootStatement.from_json(changed)
        roots = [workers[number].roots[0], false, *workers[number].roots[2:]]
        workers[number] = replace(workers[number], roots=roots)
    with pytest.raises(VerificationError, match=words):
        cross_signatures.check_histories(replace(good, workers=workers))
    data = json.loads((bundle / "proof_bundle.json").read_bytes())
    for worker in data["workers"]:
        alter(worker["roots"][1]["statement"])
    forged = bundle / "forged.json"
    forged.write_bytes(canonical(data))
    assert standalone_verify.main([str(forged)]) == 1


@pytest.mark.parametrize("drawn", [None, 7, "", "0" * 47, "G" * 48, ["0" * 16] * 3, "0" * 49])
def test_draws_of_another_form_cannot_be_read(drawn: object, bundle: Path) -> None:
    stated = _verdicts(bundle)[0].to_json()
    assert Verdict.from_json(stated).to_json() == stated
    with pytest.raises(UnreadableError):
        Verdict.from_json({**stated, "drawn": drawn})
    data = json.loads((bundle / "proof_bundle.json").read_bytes())
    data["workers"][0]["roots"][1]["statement"]["proved"]["drawn"] = drawn
    forged = bundle / "forged.json"
    forged.write_bytes(canonical(data))
    assert standalone_verify.main([str(forged)]) == 2


def _seeds() -> Iterator[PrivateJob]:
    return (replace(JOB, seed=seed) for seed in range(10))


@pytest.mark.ci("tests/engine/proofs/test_audit.py")
def test_a_lie_ends_the_run_in_an_audited_step_and_goes_through_in_another(zygote: Zygote, tmp_path: Path) -> None:
    """Whatever was drawn: the liar's run ends before anything of the step is revealed, or its step was not audited."""
    ends = set[bool]()
    for job in _seeds():
        (home := tmp_path / str(job.seed)).mkdir()
        fleet = _fleet(home, zygote, job)
        codes = _run(fleet, zygote, "stands_by_an_altered_product")
        ends.add(codes == [3, 3, 3])
        if codes == [0, 0, 0]:
            (folder := tmp_path / f"bundle{job.seed}").mkdir()
            verdict = _verdicts(_collected(fleet, folder))[EPOCH]
            assert LIAR not in verdict.audited(job.proving)
        else:
            assert codes == [3, 3, 3]
            for party in range(3):
                assert len(fleet.csv(party)) == 1 + EPOCH, "a loss of the step was revealed"
                assert max(fleet.roots(party)) == EPOCH - 1, "the epoch was finalised"
                (failed,) = fleet.events(party, "proof_failed")
                assert party == LIAR or f"P{LIAR}" in failed["pair"]
                kept = {int(p.name.split("-")[1]) for p in (fleet.dir(party) / "checkpoints").glob("step-*")}
                assert kept <= {EPOCH}
        if len(ends) == 2:
            return
    raise AssertionError(f"only {ends} in ten runs")


@pytest.mark.ci("tests/engine/proofs/test_audit.py")
def test_who_withholds_the_proof_that_it_was_drawn_for_is_named_with_that(zygote: Zygote, tmp_path: Path) -> None:
    told = set[bool]()
    for job in _seeds():
        (folder := tmp_path / str(job.seed)).mkdir()
        fleet = _fleet(folder, zygote, job)
        for link in fleet.links:
            link |= LIMITS
        assert 0 not in _run(fleet, zygote, "withholds_its_proof_once_it_knows")
        said = " ".join(str(fleet.exit(p)["error"]) for p in (0, 2))
        assert "party 1 is alive and withholds its part of a proof" in said
        told.add("party 1 could know that step 2 audits it" in said)
        if True in told:
            return
    raise AssertionError("in ten runs nobody was told so")


@pytest.mark.ci("tests/engine/proofs/test_audit.py")
def test_a_run_goes_on_with_the_audits_that_it_would_have_had(whole: Fleet, zygote: Zygote, tmp_path: Path) -> None:
    """What was begun is repeated word for word, its draws included: to leave brings no new one."""
    fleet = _fleet(tmp_path, zygote, JOB)
    _run(fleet, zygote, "dies_in_an_epoch")
    assert _run(fleet, zygote, resume=True) == [0, 0, 0], [fleet.exit(p) for p in range(3)]
    assert fleet.roots(0) == whole.roots(0)
    assert [v.drawn for v in _drawn_in(fleet)] == [v.drawn for v in _drawn_in(whole)]


def _drawn_in(fleet: Fleet) -> list[Verdict]:
    lines = (fleet.dir(0) / "transcript_p0r0s0t0" / "roots.jsonl").read_text().splitlines()
    return [Verdict.from_json(json.loads(line)["statement"]["proved"]) for line in lines]


def test_a_worker_tells_how_many_audits_its_rounds_and_bytes_are_of(whole: Fleet) -> None:
    drawn = [len(audited(v.drawn, JOB.audit_one_in)) for v in _drawn_in(whole)][1 : JOB.steps]
    assert sum(drawn) > 0
    for p in range(3):
        told = json.loads((whole.dir(p) / "heartbeat_rank0.jsonl").read_text().splitlines()[-1])
        assert told["step_audits"] == pytest.approx(sum(drawn) / len(drawn), abs=1e-6)
        assert told["step_audited"] == pytest.approx(sum(k > 0 for k in drawn) / len(drawn), abs=1e-6)


@pytest.mark.ci("tests/engine/proofs/test_audit.py")
def test_another_attempt_draws_anew(whole: Fleet, zygote: Zygote, tmp_path: Path) -> None:
    fleet = _fleet(tmp_path, zygote, JOB)
    assert _run(fleet, zygote, attempt=1) == [0, 0, 0], [fleet.exit(p) for p in range(3)]
    before, after = ({number for v in _drawn_in(one) for number in v.drawn} for one in (whole, fleet))
    assert len(before) == len(after) == 3 * (JOB.steps + 1)
    assert not before & after


def test_a_worker_of_another_rate_than_the_policy_is_refused(zygote: Zygote, tmp_path: Path) -> None:
    fleet = _fleet(tmp_path, zygote, JOB)
    assert _run(fleet, zygote, job=replace(JOB, audit_one_in=5).to_json()) == [2, 2, 2]
    assert "verify 'covert, one in 5', the signed policy 'covert, one in 2'" in fleet.exit(0)["error"]


def test_a_party_of_another_mode_is_named_before_the_first_step(zygote: Zygote, tmp_path: Path) -> None:
    fleet = _fleet(tmp_path, zygote, replace(JOB, audit_one_in=10))
    assert 0 not in _run(fleet, zygote, "proves_nothing")
    said = [str(fleet.exit(p)["error"]) for p in (0, 2)]
    assert any("P1 works with verify 'off', the policy says 'covert, one in 10'" in text for text in said), said
    assert not fleet.roots(0)


def test_what_cannot_be_audited_is_refused_by_name_before_it_begins() -> None:
    with pytest.raises(ConfigError, match="task 'infer' on 2 workers"):
        fit_model(replace(JOB, task="infer", reveal=("predictions",)), workers=2, tensor=2)
