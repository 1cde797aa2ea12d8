"""A coordinator and three domains meet at a real relay: approvals, refusals, and a coordinator who tells two tales."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "haltd"))
from relaykit import COORDINATOR, TOKENS, relay  # noqa: F401

from uvcc_console.cli.main import main
from uvcc_console.federation import domain_key, proposing, rendezvous
from uvcc_console.rollout.stages.training import agree
from uvcc_engine.contract.errors import ConfigError, ProtocolError, UnreadableError
from uvcc_engine.contract.peer_protocol.record_names import PROPOSALS
from uvcc_engine.transcript.signed import approvals, proposals
from uvcc_engine.transcript.signed.proposals import PROPOSAL_NAMESPACE, SignedProposal, Standing
from uvcc_engine.transcript.signing import sshsig
from uvcc_engine.transcript.signing.identity import Identity
from uvcc_engine.transcript.terms.policy import Policy, PolicyParty


class People:
    """A coordinator and three domains, each with a home of its own."""

    def __init__(self, root: Path, url: str, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.root, self.url, self._patch, self._capsys = root, url, patch, capsys
        self.out = self.err = ""
        for n, name in enumerate(("p0", "p1", "p2", "coordinator")):
            (root / name).mkdir()
            (root / name / "token").write_text((*TOKENS, COORDINATOR)[n])
            assert self.at(name, "domain", "init") == 0

    def be(self, who: str) -> None:
        self._patch.setenv("UVCC_HOME", str(self.root / who))

    def at(self, who: str, *args: str) -> int:
        """Run a verb as somebody."""
        self.be(who)
        meets = args[0] in ("propose", "proposals", "join")
        more = ["--relay", self.url, "--token-file", str(self.root / who / "token")] if meets else []
        code = main([*args, *more])
        self.out, self.err = self._capsys.readouterr()
        return code

    def key(self, who: str) -> Path:
        return self.root / who / "config" / "domain" / domain_key.PUBLIC_FILE

    def allows(self, who: str, **rules: Any) -> None:
        (self.key(who).parent / "policy.yaml").write_text(json.dumps(rules))

    def propose(self) -> str:
        domains = [part for n in range(3) for part in ("--domain", str(self.key(f"p{n}")))]
        assert self.at("coordinator", "propose", "demo", *domains, "--json", "--set", "job.steps=9") == 0, self.err
        return str(json.loads(self.out)["proposal"])


@pytest.fixture
def people(
    tmp_path: Path,
    relay: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> People:
    return People(tmp_path, relay, monkeypatch, capsys)


def test_three_domains_approve_and_everybody_can_check_it(people: People) -> None:
    trusted = people.key("coordinator").read_text().rsplit(" ", 1)[0]
    wanted = people.propose()
    for n in range(3):
        people.allows(f"p{n}", yes_for=[trusted])
        assert people.at(f"p{n}", "join", wanted[:10], "--yes") == 0, people.err
        assert "without it: one operator runs the data owner's program" in people.out
        assert "with rollout --domain: each of three domains drives its own pods" in people.out
    assert people.at("coordinator", "proposals") == 0
    assert "approved by all three" in people.out
    kept = rendezvous.kept(wanted[:8])
    with pytest.raises(ConfigError, match="no proposal '' is kept"):
        rendezvous.kept("")
    assert people.at("p1", "join", "") == 2, "an empty word approved the only one that was there"
    people.be("coordinator")
    assert kept.approved
    assert Standing.from_json(kept.to_json()) == kept
    _a_rollout_is_held_to_it(people.root, kept)
    for party in ("0", "1", "2"):  # an approval of one domain is none of another, and none of another text
        whole = kept.to_json()
        other = str((int(party) + 1) % 3)
        with pytest.raises(UnreadableError, match="did not sign"):
            Standing.from_json(whole | {"approvals": {**whole["approvals"], party: whole["approvals"][other]}})


def test_who_joins_with_another_release_is_told_before_it_signs(
    people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusted = people.key("coordinator").read_text().rsplit(" ", 1)[0]
    wanted = people.propose()
    people.allows("p0", yes_for=[trusted])
    assert people.at("p0", "join", wanted, "--yes") == 0, people.err
    assert "own code" not in people.out
    people.allows("p1", yes_for=[trusted])
    monkeypatch.setattr(proposing, "own_code", lambda: "ab" * 32)
    assert people.at("p1", "join", wanted, "--yes") == 0, people.err  # it may conduct from another machine
    assert f"own code     {'ab' * 32}: not the proposal's; install its release here before uvcc rollout" in people.out


def _a_rollout_is_held_to_it(root: Path, standing: Standing) -> None:
    """No policy gets a signature that differs from what was approved, or that one domain did not approve."""
    p = standing.signed.proposal
    ctx: Any = SimpleNamespace(run_dir=root / "run", artifacts=root / "run" / "artifacts")
    ctx.run_dir.mkdir()
    parties = [PolicyParty(n, Identity.create(root / f"id{n}").public, p.providers[n], "here") for n in range(3)]

    def policy(**job: Any) -> Policy:
        return Policy.build(
            job={**p.job, **job},
            model_hash="11" * 32,
            code_hash=p.code_hash,
            topology=p.topology,
            parties=parties,
            owner="owner",
            commitments=["22" * 32] * 3,
            reveal=[r.value for r in p.reveal],
            limits=asdict(p.limits),
        )

    full, smoke = SimpleNamespace(name="full"), SimpleNamespace(name="smoke")
    agree.check_proposal(ctx, full, policy(lr=9))  # type: ignore[arg-type]  # not started from a proposal
    written = ctx.run_dir / proposals.FILE
    written.write_text(json.dumps(standing.to_json()))
    agree.check_proposal(ctx, full, policy())  # type: ignore[arg-type]
    agree.check_proposal(ctx, smoke, policy(steps=2))  # type: ignore[arg-type]
    assert (ctx.artifacts / proposals.FILE).read_bytes() == written.read_bytes()
    for phase, job in ((full, {"steps": 2}), (full, {"lr": 9}), (smoke, {"lr": 9}), (smoke, {"steps": 10})):
        with pytest.raises(ConfigError, match="is not what the domains approved: job"):
            agree.check_proposal(ctx, phase, policy(**job))  # type: ignore[arg-type]
    written.write_text(json.dumps({**standing.to_json(), "approvals": {}}))
    with pytest.raises(ConfigError, match="they did not all approve it"):
        agree.check_proposal(ctx, full, policy())  # type: ignore[arg-type]


def test_where_no_proposal_lies_it_is_said(people: People) -> None:
    """Nothing at all was printed, after a relay had been started anew, too."""
    assert people.at("p0", "proposals") == 0
    assert people.err.startswith("no proposal lies there")
    assert people.at("p0", "proposals", "--json") == 0
    assert json.loads(people.out)["proposals"] == []


def test_a_proposal_fits_eighty_columns(people: People, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    domains = [part for n in range(3) for part in ("--domain", str(people.key(f"p{n}")))]
    assert people.at("coordinator", "propose", "demo", *domains, "--set", "job.steps=9") == 0
    lines = people.out.splitlines()
    assert max(len(line) for line in lines) <= 80
    at = next(n for n, line in enumerate(lines) if line.startswith("operated"))
    assert lines[at + 1].startswith(" " * 13)


def test_a_proposal_that_names_owners_says_what_is_sealed_to_them(people: People) -> None:
    domains = [part for n in range(3) for part in ("--domain", str(people.key(f"p{n}")))]
    opened = ("--json", "--set", "job.reveal=[loss, weights]", "--set", "job.steps=9")
    for named, to in (((), "all"), (("--owner", str(people.key("coordinator"))), "owner")):
        assert people.at("coordinator", "propose", "demo", *domains, *named, *opened) == 0, people.err
        found = rendezvous.kept(str(json.loads(people.out)["proposal"])).signed.proposal
        assert [(r.value, r.to) for r in found.reveal] == [("loss", "all"), ("weights", to)]


def test_an_owners_digits_are_those_that_the_proposal_shows(people: People) -> None:
    """It said a key in hexadecimal, which no other screen shows."""
    (people.root / "north").mkdir()
    assert people.at("north", "owner", "init") == 0
    key, digits = people.out.splitlines()
    owner = people.root / "north" / "config" / "owner" / "owner.pub"
    assert owner.read_text().startswith(f"{key} ")
    assert people.at("north", "domain", "show", str(owner)) == 0
    assert people.out.splitlines() == [key, digits]
    domains = [part for n in range(3) for part in ("--domain", str(people.key(f"p{n}")))]
    assert people.at("coordinator", "propose", "demo", *domains, "--owner", str(owner), "--set", "job.steps=9") == 0
    assert f"owner        {digits.removeprefix('fingerprint ')}" in people.out


def test_outside_the_site_policy_nobody_is_asked_and_the_rule_is_named(people: People) -> None:
    wanted = people.propose()
    people.allows("p1", models=["other"])
    assert people.at("p1", "join", wanted, "--yes") == 1
    assert "REFUSED      models: mlp-digits is not approved here" in people.out
    assert people.at("p2", "join", wanted, "--refuse", "not today") == 1
    assert people.at("p0", "join", wanted, "--yes") == 2  # inside the policy, but it marks no coordinator for --yes
    assert people.at("coordinator", "proposals", "--json") == 0
    (row,) = json.loads(people.out)["proposals"]
    assert row["said"] == {"P1": "refuse", "P2": "refuse"}
    assert not row["approved"]
    assert people.at("coordinator", "join", wanted) == 2
    assert "does not name this domain" in people.err


def test_a_coordinator_who_shows_two_texts_is_named_and_both_are_kept(people: People) -> None:
    wanted = people.propose()
    people.be("coordinator")
    ours, first = domain_key.load(), rendezvous.kept(wanted).signed
    altered = replace(first.proposal, job={**first.proposal.job, "batch": 16})
    second = SignedProposal.make(altered, lambda payload: ours.sign(PROPOSAL_NAMESPACE, payload))
    there = rendezvous.Rendezvous(people.url, TOKENS[1])
    there.leave(f"{PROPOSALS}{altered.id}", second.body)
    who = domain_key.fingerprint(ours.public)
    for n, shown in enumerate((wanted, altered.id)):
        assert people.at(f"p{n}", "join", shown, "--refuse", "x") == 1
        assert who in people.err
        (path,) = (people.key(f"p{n}").parent / rendezvous.EVIDENCE).glob("*.json")
        texts = [SignedProposal.opened(body) for body in json.loads(path.read_text())["texts"]]
        assert {t.proposal.id for t in texts if t is not None} == {wanted, altered.id}
    assert people.at("p2", "proposals") == 1
    assert who in people.err
    assert len(list((people.key("p2").parent / rendezvous.EVIDENCE).glob("*.json"))) == 1


def test_what_concerns_others_is_listed_and_not_kept(people: People) -> None:
    wanted = people.propose()
    (people.root / "other").mkdir()
    (people.root / "other" / "token").write_text(TOKENS[0])
    assert people.at("other", "domain", "init") == 0
    assert people.at("other", "proposals") == 0
    assert wanted[:12] in people.out
    with pytest.raises(ConfigError, match=r"fits 0 of|is kept here"):
        rendezvous.kept(wanted)


def test_a_person_is_asked_and_only_a_yes_is_one_and_nothing_but_a_reason_refuses(
    people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal stands for all three: a slip of the finger must not sign one."""
    wanted = people.propose()
    for who, line, code in (("p0", "yes\n", 0), *(("p1", line, 1) for line in ("maybe\n", "\n", "n\n", ""))):
        terminal = io.StringIO(line)
        terminal.isatty = lambda: True  # type: ignore[method-assign]
        monkeypatch.setattr(sys, "stdin", terminal)
        assert people.at(who, "join", wanted) == code
        assert f"Approve demo as P{who[1]}?" in people.err
    found, _ = rendezvous.Rendezvous(people.url, TOKENS[0]).look()
    assert {n: a.decision for n, (a, _) in found[wanted].said.items()} == {0: "approve"}
    assert "nothing was signed" in people.err
    terminal = io.StringIO("yes\n")
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdin", terminal)
    assert people.at("p1", "join", wanted) == 0, people.err  # it may still be approved


def test_a_relay_that_withholds_one_text_is_found_out_by_what_was_kept(people: People) -> None:
    """The relay shows this domain the second text only; it kept the first."""
    wanted = people.propose()
    people.be("coordinator")
    ours, first = domain_key.load(), rendezvous.kept(wanted).signed
    altered = replace(first.proposal, reveal=())
    second = SignedProposal.make(altered, lambda payload: ours.sign(PROPOSAL_NAMESPACE, payload))
    people.be("p0")
    rendezvous.keep(Standing(first))
    with pytest.raises(ProtocolError, match="signed two texts as one proposal"):
        rendezvous.check_no_equivocation(second, [])


def test_what_nobody_signed_is_not_there(people: People) -> None:
    wanted = people.propose()
    body = rendezvous.kept(wanted).signed.body
    forged = body.replace('"batch":', '"batch":1')
    bad = ["", "[]", "{}", "\ud800", "[" * 9000, forged, body.replace("uvcc", "uvcd"), json.dumps({"content": 1})]
    found, twice = proposals.standings([*bad, body])
    assert set(found) == {wanted}
    assert not twice
    assert approvals.opened(body, found[wanted].signed.proposal.coordinator) is None


def test_a_flood_of_proposals_and_words_costs_each_its_own_checks(
    people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write there can sign proposals of its own; each word is checked for the one that it names only."""
    wanted = people.propose()
    people.be("coordinator")
    ours, first = domain_key.load(), rendezvous.kept(wanted).signed.proposal
    bodies = []
    for n in range(12):
        p = replace(first, nonce=f"{n:064x}")
        word = approvals.Approval(of="proposal", sha256=p.id, party=0, decision="approve")
        bodies.append(SignedProposal.make(p, lambda payload: ours.sign(PROPOSAL_NAMESPACE, payload)).body)
        bodies.append(approvals.signed(word, lambda payload: ours.sign(approvals.APPROVAL_NAMESPACE, payload)))
    checks, holds = [], sshsig.holds
    monkeypatch.setattr(sshsig, "holds", lambda *args: checks.append(args[0]) or holds(*args))
    found, _ = proposals.standings([*bodies, *['{"content":{"sha256":7}}', "[" * 9000]])
    assert len(found) == 12
    assert len(checks) <= 12 + 12 * 3
    assert not any(s.said for s in found.values())  # the coordinator's key is no domain's
