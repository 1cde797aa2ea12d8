"""An auditor who pinned the domains' keys sees whether they approved what was run, and what was not so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from evidence_kit import STEPS, World

from uvcc_engine.contract.errors import UvccError, VerificationError
from uvcc_engine.transcript.proof import approval_check, cli, package
from uvcc_engine.transcript.proof.bundle import NAME
from uvcc_engine.transcript.signed import approvals, proposals
from uvcc_engine.transcript.signed.approvals import Approval
from uvcc_engine.transcript.signed.proposals import SignedProposal, Standing
from uvcc_engine.transcript.signing import sshsig
from uvcc_engine.transcript.terms.operation import BY_THREE
from uvcc_engine.transcript.terms.policy import Policy
from uvcc_engine.transcript.terms.proposal import Proposal, ProposedLimits, Revealed


class Key:
    def __init__(self) -> None:
        self._key = Ed25519PrivateKey.generate()
        self._raw = self._key.public_key().public_bytes_raw()
        self.line = sshsig.public_line(self._raw)

    def signer(self, namespace: str) -> Callable[[bytes], str]:
        return lambda payload: sshsig.sign(self._key, self._raw, namespace, payload)


KEYS = [Key() for _ in range(4)]


def proposal_of(policy: Policy, **changes: Any) -> Proposal:
    limits = {"hourly": 0.0, "total": 0.0, "ttl_s": 0.0} | dict(policy.limits)
    first, second, third = (p.provider for p in policy.parties)
    whole = Proposal(
        version=1,
        name="digits",
        coordinator=KEYS[3].line,
        domains=(KEYS[0].line, KEYS[1].line, KEYS[2].line),
        owners=(),
        job=dict(policy.job),
        topology=policy.topology,
        code_hash=policy.code_hash,
        reveal=tuple(Revealed(value=v, to=to) for v, to in policy.reveal),
        providers=(first, second, third),
        limits=ProposedLimits(**limits),
        created=1,
        expires=2,
        nonce="ab" * 32,
    )
    return replace(whole, **changes)


def standing_of(proposal: Proposal, refused_by: int = -1, silent: int = -1) -> Standing:
    made = Standing(SignedProposal.make(proposal, KEYS[3].signer(proposals.PROPOSAL_NAMESPACE)))
    for p in range(3):
        word = Approval(of="proposal", sha256=proposal.id, party=p, decision="refuse" if p == refused_by else "approve")
        if p != silent:
            made = made.hearing(approvals.signed(word, KEYS[p].signer(approvals.APPROVAL_NAMESPACE)))
    return made


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Policy]:
    """A finished run's bundle in the folder of its full phase, and its policy."""
    root = tmp_path_factory.mktemp("run")
    world = World(root / "world")
    world.open()
    world.steps(range(STEPS))
    world.end()
    (root / "run" / "full").mkdir(parents=True)
    shutil.copy(world.bundle(), root / "run" / "full" / NAME)
    world.close()
    return root / "run", world.policy


def check(run: tuple[Path, Policy], standing: Standing, pinned: list[str]) -> str:
    root, _ = run
    (root / proposals.FILE).write_text(json.dumps(standing.to_json()))
    return approval_check.check(package.find(root), pinned)


OURS = [k.line for k in KEYS[:3]]


def test_what_three_pinned_domains_approved_is_said(run: tuple[Path, Policy]) -> None:
    wanted = proposal_of(run[1])
    assert wanted.differs(run[1]) == ""
    assert check(run, standing_of(wanted), OURS) == (
        f"approved     by the three domains that were named: proposal {wanted.id}"
    )


def test_a_run_of_three_domains_without_their_rosters_is_not_called_theirs(
    run: tuple[Path, Policy], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever hands the run over may leave the rosters out; then nobody shows who drove the pods."""
    wanted = proposal_of(run[1])
    apart = replace(run[1], proposal=wanted.id)
    monkeypatch.setattr(approval_check, "read_bundle", lambda *_, **__: SimpleNamespace(policy=apart))
    with pytest.raises(VerificationError, match=r"there is no rosters\.json"):
        check(run, standing_of(wanted), OURS)
    # and whoever names no domain's key is told that nobody was asked
    examine = package.examine

    def of_three(*args: Any, **more: Any) -> Any:
        found = examine(*args, **more)
        return replace(
            found, certificates={n: replace(c, operation=(BY_THREE,)) for n, c in found.certificates.items()}
        )

    assert cli.main([str(run[0])]) == 3
    assert "NOT ASKED" not in capsys.readouterr().out
    monkeypatch.setattr(package, "examine", of_three)
    assert cli.main([str(run[0])]) == 3
    assert "NOT ASKED    whether three domains approved this and drove it" in capsys.readouterr().out
    assert cli.main([str(run[0]), "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["not_asked"] == cli.NOT_ASKED


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"refused_by": 1}, "P1's domain .* refused the proposal"),
        ({"silent": 2}, "P2's domain .* said nothing of the proposal"),
    ],
)
def test_a_domain_that_did_not_approve_is_named(run: tuple[Path, Policy], how: dict[str, int], words: str) -> None:
    with pytest.raises(VerificationError, match=words):
        check(run, standing_of(proposal_of(run[1]), **how), OURS)


def test_other_domains_than_those_pinned_do_not_count(run: tuple[Path, Policy]) -> None:
    with pytest.raises(VerificationError, match=r"P2 of the proposal is .* none of the domains named"):
        check(run, standing_of(proposal_of(run[1])), [*OURS[:2], KEYS[3].line])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("job", {"kind": "private", "steps": STEPS, "lr": 0.5}),
        ("code_hash", "00" * 32),
        ("reveal", ()),
        ("limits", ProposedLimits(hourly=1.0, total=0.0, ttl_s=0.0)),
        ("providers", ("a", "b", "c")),
    ],
)
def test_a_run_that_is_not_what_was_approved_is_told_by_field(
    run: tuple[Path, Policy], field: str, value: object
) -> None:
    with pytest.raises(VerificationError, match=f"not what the domains approved: .*{field}"):
        check(run, standing_of(proposal_of(run[1], **{field: value})), OURS)


def test_a_smoke_may_be_smaller_and_nothing_else(run: tuple[Path, Policy]) -> None:
    policy = run[1]
    longer = proposal_of(policy, job={**policy.job, "steps": 99})
    assert longer.differs(policy) == "job"
    assert longer.differs(policy, smoke=True) == ""
    assert proposal_of(policy, job={**policy.job, "steps": 1}).differs(policy, smoke=True) == "job"
    assert proposal_of(policy, job={**policy.job, "steps": 99, "lr": 9}).differs(policy, smoke=True) == "job"


def test_an_altered_document_is_refused(run: tuple[Path, Policy]) -> None:
    whole = standing_of(proposal_of(run[1])).to_json()
    for bad in (
        whole | {"approvals": {**whole["approvals"], "0": whole["approvals"]["1"]}},
        whole | {"proposal": whole["proposal"].replace("digits", "digitz")},
        whole | {"more": 1},
        {"proposal": 1, "approvals": []},
    ):
        (run[0] / proposals.FILE).write_text(json.dumps(bad))
        with pytest.raises(UvccError):
            approval_check.check(package.find(run[0]), OURS)


def test_the_verb_takes_the_keys_from_files(
    run: tuple[Path, Policy], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, policy = run
    options = []
    for n, line in enumerate(OURS):
        (tmp_path / f"{n}.pub").write_text(f"{line} uvcc-domain\n")
        options += ["--domain", str(tmp_path / f"{n}.pub")]
    (root / proposals.FILE).write_text(json.dumps(standing_of(proposal_of(policy)).to_json()))
    assert cli.main([str(root), *options]) == 3  # that the domains approved says nothing of whose pods signed
    said = capsys.readouterr().out
    assert said.splitlines()[0] == package.UNPINNED
    assert "approved     by the three domains" in said
    assert cli.main([str(root), *options[:4]]) == 2
    (root / proposals.FILE).unlink()
    assert cli.main([str(root), *options]) == 1
    assert "nobody shows what these domains approved" in capsys.readouterr().err
