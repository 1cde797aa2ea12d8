"""What the parties sign after a proof that failed, and what a reader of their statements may conclude."""

from __future__ import annotations

import errno
import itertools
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from evidence_kit import World

from uvcc_engine.contract.errors import ConfigError, UnreadableError, UvccError
from uvcc_engine.contract.job.topology import Coord
from uvcc_engine.transcript.proof import cli
from uvcc_engine.transcript.signed import proof_findings
from uvcc_engine.transcript.signed.proof_findings import SignedFinding, concluded
from uvcc_engine.transcript.signing.identity import Identity
from uvcc_engine.transcript.terms.policy import Policy

PARTIES = range(3)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


def _said(under: Policy, party: int, suspects: list[int], **more: Any) -> SignedFinding:
    why = "it judged against the numbers that it states itself" if len(suspects) == 1 else ""
    fields: dict[str, Any] = {
        "policy": under.hash.hex(),
        "coord": f"p{party}r0s0t0",
        "attempt": 0,
        "epoch": 2,
        "why": why,
    }
    return SignedFinding(**{**fields, "suspects": suspects, **more})


def _record(identity: Identity, finding: SignedFinding) -> str:
    return proof_findings.signed(finding, partial(identity.sign, proof_findings.NAMESPACE))


def test_whatever_one_liar_signs_it_stays_among_those_who_may_have_lied(world: World) -> None:
    """And whoever two others name is the only one left, whatever it signs itself."""
    sides = {
        p: [s for n in range(3) for s in itertools.combinations([q for q in PARTIES if q != p], n)] for p in PARTIES
    }
    for liar in PARTIES:
        a, b = (p for p in PARTIES if p != liar)
        honest = [[s for s in sides[p] if liar in s] for p in (a, b)]
        for (of_a, of_b), of_liar in itertools.product(itertools.product(*honest), [*sides[liar], None]):
            signed = {a: of_a, b: of_b}
            if of_liar is not None:
                signed[liar] = of_liar
            (found,) = concluded(_said(world.policy, p, list(s)) for p, s in signed.items())
            assert liar in found.open_to
            if of_a == of_b == (liar,) or of_liar == ():
                assert found.open_to == (liar,)
            assert found.lines()[-1].count("P") >= (len(found.open_to) < 3)


def test_two_statements_of_one_party_that_differ_convict_it(world: World) -> None:
    both = [_said(world.policy, 1, [0]), _said(world.policy, 1, [0, 2]), _said(world.policy, 0, [1, 2])]
    (found,) = concluded(both)
    assert found.open_to == (1,)
    assert len(concluded([both[0], _said(world.policy, 0, [1], epoch=3)])) == 2, "about another failure"


def test_statements_that_fit_no_single_liar_say_that_two_lied(world: World) -> None:
    (found,) = concluded([_said(world.policy, 0, []), _said(world.policy, 1, [])])
    assert (found.open_to, "at least two" in found.lines()[-1]) == ((), True)


def test_a_file_of_findings_is_read_back_and_verify_tells_what_follows(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / proof_findings.file_name(Coord(0, 0, 0, 0))
    records = [_record(world.identities[p], _said(world.policy, p, s)) for p, s in ((0, [2]), (1, [2]), (2, [0]))]
    proof_findings.write(path, world.policy, records)
    assert len(proof_findings.read(path, world.policy)) == 3
    assert cli.main([str(path)]) == 1
    out = capsys.readouterr()
    assert "P0 signed that P2 lied: it judged against the numbers" in out.out
    assert "if at most one of the three domains is corrupt: P2 lied" in out.out
    assert "the policy in the file itself" in out.err
    # beside what a run left
    assert cli.main([str(tmp_path), "--json"]) == 2
    told = json.loads(capsys.readouterr().out)
    assert [one["open_to"] for one in told["failed_proofs"]] == [[2]]
    (tmp_path / "finding_p1r0s0t0.json").write_text("{")
    assert len(proof_findings.told(tmp_path)) == 1, "a file that anybody may have put there counts for nothing"


def test_a_disk_that_is_full_leaves_the_file_as_it_was(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / proof_findings.file_name(Coord(0, 0, 0, 0))
    record = _record(world.identities[0], _said(world.policy, 0, [2]))
    proof_findings.write(path, world.policy, [record])

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UvccError, match=f"cannot write .*{path.name}"):
        proof_findings.write(path, world.policy, [record, record])
    assert len(proof_findings.read(path)) == 1
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("odd", ["other key", "other policy", "cut", "no text", "not signed as a finding"])
def test_a_statement_that_its_party_did_not_sign_counts_for_nothing(world: World, tmp_path: Path, odd: str) -> None:
    good, mine = _record(world.identities[1], _said(world.policy, 1, [2])), _said(world.policy, 0, [2])
    record: Any = {
        "other key": _record(world.identities[1], mine),
        "other policy": _record(world.identities[0], _said(world.policy, 0, [2], policy="0" * 64)),
        "cut": _record(world.identities[0], mine)[:-9],
        "no text": ["?"],
        "not signed as a finding": proof_findings.signed(mine, partial(world.identities[0].sign, "uvcc-root")),
    }[odd]
    path = tmp_path / "finding_p0r0s0t0.json"
    proof_findings.write(path, world.policy, [record, good])
    assert [one.party for one in proof_findings.read(path)] == [1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"suspects": [0]},
        {"suspects": [2, 1]},
        {"suspects": [1, 1]},
        {"suspects": [3]},
        {"policy": "G" * 64},
        {"attempt": -1},
        {"epoch": 1 << 32},
        {"why": "a\nb"},
        {"why": "x" * 300},
        {"version": 2},
        {"coord": "p3r0s0t0"},
    ],
)
def test_a_finding_of_another_form_is_none(world: World, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        _said(world.policy, 0, **({"suspects": [1]} | wrong))


def test_a_file_of_another_form_or_policy_is_named(world: World, tmp_path: Path) -> None:
    path = tmp_path / "finding_p0r0s0t0.json"
    for text in ("[]", "{}", '{"format": "x", "policy": {}, "records": []}'):
        path.write_text(text)
        with pytest.raises(UnreadableError, match="finding_p0r0s0t0"):
            proof_findings.read(path)
    whole = {"format": proof_findings.FORMAT, "policy": world.policy.to_json(), "records": {}}
    path.write_text(json.dumps(whole))
    with pytest.raises(UnreadableError, match="no file of findings"):
        proof_findings.read(path)
