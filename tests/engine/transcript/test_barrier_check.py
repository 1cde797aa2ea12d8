"""What domains sign stage by stage is held to what was run: forged packages, all of whose signatures are genuine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from three_domains import KEYS, DomainsRun, make, stopped

from uvcc_engine.contract.errors import VerificationError
from uvcc_engine.transcript.proof import approval_check, cli, package, standalone_verify
from uvcc_engine.transcript.signed import barriers, roster

OTHER = "ee" * 32
KEYS_OF = KEYS[:3]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> DomainsRun:
    return make(tmp_path_factory.mktemp("made") / "run")


@pytest.fixture
def run(made: DomainsRun, tmp_path: Path) -> DomainsRun:
    """A package of one's own."""
    shutil.copytree(made.root, tmp_path / "run")
    return DomainsRun(tmp_path / "run", made.proposal, dict(made.rosters))


def check(run: DomainsRun, phase: str = "") -> str:
    return approval_check.check(package.find(run.root, phase), KEYS_OF)


def test_a_run_that_all_three_drove_to_its_end_is_said_to_be_theirs(run: DomainsRun) -> None:
    said = check(run)
    assert "driven       by these domains, each its own pods: 3 rosters" in said
    assert "not signed" not in said
    assert check(run, "smoke").splitlines()[0] == said.splitlines()[0]  # its steps are fewer than proposed


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ("roster", "signed over other rosters"),
        ("shares", "took other inputs than the policy of full"),
        ("policy-smoke", "approved another policy of smoke"),
        ("smoke", "signed another result of smoke"),
        ("verify-smoke", "verified another run of smoke"),
        ("policy-full", "approved another policy of full"),
        ("full", "signed another result of full"),
        ("verify-full", "verified another run of full: its global root is not"),
    ],
)
@pytest.mark.parametrize("who", [(1,), (0, 1, 2)])
def test_a_domain_that_signed_another_report_than_lies_there_is_named(
    stage: str, words: str, who: tuple[int, ...], run: DomainsRun
) -> None:
    run.says = {(stage, p): OTHER for p in who}
    run.sign()
    with pytest.raises(VerificationError, match=f"{', '.join(f'P{p}' for p in who)} {words}"):
        check(run)


def test_a_phase_that_the_domains_signed_and_that_was_left_out_is_missed(run: DomainsRun) -> None:
    shutil.rmtree(run.root / "smoke")
    with pytest.raises(VerificationError, match="signed that they verified smoke, of which no bundle is here"):
        check(run)
    assert "driven" in check(run, "full")  # who asks about one phase has no promise of the others


@pytest.mark.parametrize("last", ["policy-full", "full", "evidence-full"])
def test_a_full_phase_that_came_to_no_bundle_leaves_the_smoke_as_good(last: str, run: DomainsRun) -> None:
    """No domain lied: the attempt ended while it ran, at one of them first."""
    shutil.rmtree(run.root / "full")
    run.phases, run.leaves_out = ("smoke",), {(last, 2)}
    run.sign(("smoke", "full"))
    assert "driven       by these domains" in check(run)


def test_a_phase_that_no_domain_signed_is_not_theirs(run: DomainsRun) -> None:
    run.sign(("full",))
    with pytest.raises(VerificationError, match="P0, P1, P2 did not sign that it reached policy-smoke"):
        check(run)
    shutil.copytree(run.root / "full", run.root / "more")
    run.sign()
    with pytest.raises(VerificationError, match="P0, P1, P2 did not sign that it reached policy-more"):
        check(run)


def test_a_domain_that_did_not_verify_or_that_failed_is_told(run: DomainsRun) -> None:
    run.leaves_out = {("verify-full", 1)}
    run.more = [stopped(run, 1, "verify-full", "leaves differ [31m")]
    run.sign()
    said = check(run).splitlines()
    assert "not signed   P1 did not sign that it verified full itself" in said
    assert "stopped      P1 signed at verify-full that it goes no further: leaves differ [31m" in said


def test_rosters_of_another_attempt_vouch_for_nothing(tmp_path: Path) -> None:
    """The keys of the pods are the same, and each domain signed both attempts: it is not one run all the same."""
    forged = make(tmp_path / "run", attempt=0, rosters_of=1)
    with pytest.raises(VerificationError, match="the rosters are of attempt 1, the policy is of attempt 0"):
        check(forged)


SMOKES = [
    ({"reveal": [{"value": v, "to": "all"} for v in ("loss", "accuracy", "weights")]}, "reveal"),
    ({"job": {"kind": "private", "steps": 1, "lr": 0.5}}, "job"),
]


@pytest.mark.parametrize(("of_smoke", "field"), SMOKES)
def test_a_smoke_that_is_not_what_was_approved_is_refused_by_both_verifiers(
    of_smoke: dict[str, object], field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All three pods signed a smoke that opens more than the run, or trains something else."""
    forged = make(tmp_path / "run", of_phase={"smoke": of_smoke})
    with pytest.raises(VerificationError, match=f"phase smoke is not what the domains approved: {field}"):
        check(forged)
    assert cli.main([str(forged.root)]) == 1
    assert standalone_verify.main([str(forged.root)]) == 1
    told = {"reveal": "reveal different values", "job": "are of different jobs: lr"}[field]
    ours, other = capsys.readouterr().err.splitlines()
    assert f"phases full and smoke {told}" in ours
    assert f"full, smoke {told.partition(':')[0]}" in other


def test_files_that_hold_no_barriers_are_refused_in_plain_words(run: DomainsRun) -> None:
    for bad in ("{}", "[1]", "[", json.dumps([{}]), "[" * 5000):
        (run.root / barriers.FILE).write_text(bad)
        options = [part for n in range(3) for part in ("--domain", str(run.root.parent / f"{n}.pub"))]
        for n, key in enumerate(KEYS_OF):
            (run.root.parent / f"{n}.pub").write_text(key)
        assert cli.main([str(run.root), *options]) in (1, 2)
    (run.root / barriers.FILE).write_text(json.dumps(["", "x", "{}", '{"content": {}}']))
    with pytest.raises(VerificationError, match="did not sign that it reached roster"):
        check(run)
    (run.root / barriers.FILE).unlink()
    with pytest.raises(VerificationError, match=r"there is no barriers\.json: nobody shows how they drove it"):
        check(run)
    (run.root / roster.FILE).unlink()
    with pytest.raises(VerificationError, match=r"there is no rosters\.json"):
        check(run)
