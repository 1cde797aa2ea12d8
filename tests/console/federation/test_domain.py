"""A domain's own key and its site policy: made once, private, strict, and judged by name."""

from __future__ import annotations

import argparse
import os
import socket
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from uvcc_console.cli.main import main
from uvcc_console.cli.parties.propose import add_relay
from uvcc_console.federation import domain_key, site_policy
from uvcc_console.federation.site_policy import SitePolicy, evaluate
from uvcc_console.plan.federated import of_domain
from uvcc_console.plan.plan import make_plan
from uvcc_console.plan.profile import load
from uvcc_engine.contract.errors import ConfigError, UnreadableError, UvccError
from uvcc_engine.contract.job.topology import Topology
from uvcc_engine.transcript.signing import sshsig
from uvcc_engine.transcript.terms.proposal import Proposal, ProposedLimits, Revealed

KEYS = [sshsig.public_line(bytes([n]) * 32) for n in range(6)]
NOON = 1_800_000_000 // 86400 * 86400 + 12 * 3600


def silent() -> dict[str, Any]:
    """A job that does not say what it opens: its workers open what is opened by default."""
    return {key: value for key, value in proposal().job.items() if key != "reveal"}


def proposal(**changes: Any) -> Proposal:
    whole = Proposal(
        version=1,
        name="digits",
        coordinator=KEYS[4],
        domains=(KEYS[0], KEYS[1], KEYS[2]),
        owners=(KEYS[3],),
        job={"kind": "private", "model": "mlp-digits", "batch": 64, "test_rows": 360, "reveal": ["loss", "accuracy"]},
        topology=Topology(),
        code_hash="ab" * 32,
        reveal=(Revealed(value="loss", to="all"), Revealed(value="accuracy", to="all")),
        providers=("a", "b", "c"),
        limits=ProposedLimits(hourly=0.0, total=0.0, ttl_s=3600.0),
        created=NOON - 60,
        expires=NOON + 3600,
        nonce="cd" * 32,
    )
    return replace(whole, **changes)


def test_a_key_is_private_signs_as_ssh_keygen_checks_and_is_made_once(tmp_path: Path) -> None:
    made = domain_key.create()
    for name in (domain_key.KEY_FILE, domain_key.PUBLIC_FILE):
        assert stat.S_IMODE((made.folder / name).stat().st_mode) == 0o600
    assert stat.S_IMODE(made.folder.stat().st_mode) == 0o700
    signed = domain_key.load().sign("uvcc-approval", b"text")
    (tmp_path / "s").write_text(signed)
    (tmp_path / "allowed").write_text(f"us {made.public}\n")
    command = ["ssh-keygen", "-Y", "verify", "-f", tmp_path / "allowed", "-I", "us", "-n", "uvcc-approval"]
    assert subprocess.run([*command, "-s", tmp_path / "s"], input=b"text", capture_output=True).returncode == 0
    with pytest.raises(ConfigError, match="there is a domain's key"):
        domain_key.create()
    (made.folder / domain_key.KEY_FILE).chmod(0o644)
    with pytest.raises(UnreadableError, match="readable by others"):
        made.sign("uvcc-approval", b"text")


def test_a_passphrase_is_asked_for_by_ssh_keygen_and_must_be_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def say(words: str) -> None:
        (tmp_path / "ask").write_text(f"#!/bin/sh\necho '{words}'\n")
        (tmp_path / "ask").chmod(0o700)

    monkeypatch.setenv("SSH_ASKPASS", str(tmp_path / "ask"))
    monkeypatch.setenv("SSH_ASKPASS_REQUIRE", "force")
    say("correct horse")
    made = domain_key.create(passphrase=True)
    assert stat.S_IMODE((made.folder / domain_key.KEY_FILE).stat().st_mode) == 0o600
    assert sshsig.holds(made.public, "n", b"text", made.sign("n", b"text"))
    say("battery staple")
    with pytest.raises(UvccError, match="does not sign"):
        made.sign("n", b"text")


def test_a_key_that_ssh_keygen_signs_with_stays_where_it_is(tmp_path: Path) -> None:
    elsewhere = tmp_path / "id"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", elsewhere], check=True)
    made = domain_key.create(key=elsewhere)
    assert not (made.folder / domain_key.KEY_FILE).exists()
    assert sshsig.holds(made.public, "n", b"text", made.sign("n", b"text"))
    elsewhere.unlink()
    with pytest.raises(UvccError, match="does not sign"):
        made.sign("n", b"text")


SOFTWARE_TOKEN = Path(os.environ.get("UVCC_SOFTWARE_TOKEN", "/usr/lib/openssh/regress/misc/sk-dummy/sk-dummy.so"))


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A real ssh-agent of the test's own."""
    sock = tmp_path / "agent.sock"
    allowed = ["-P", str(SOFTWARE_TOKEN)]
    process = subprocess.Popen(
        ["ssh-agent", "-D", "-a", sock, *allowed], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    monkeypatch.setenv("SSH_AUTH_SOCK", str(sock))
    while not _listens(sock):
        assert process.poll() is None
    yield
    process.terminate()
    process.wait(120)


def _listens(sock: Path) -> bool:
    """Whether it answers: the file is there a moment before."""
    with socket.socket(socket.AF_UNIX) as visitor:
        try:
            visitor.connect(str(sock))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
    return True


def test_an_agents_key_signs_while_the_agent_holds_it_and_no_private_half_is_on_disk(
    tmp_path: Path, agent: None
) -> None:
    held, public = tmp_path / "id", tmp_path / "id.pub"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", held], check=True)
    subprocess.run(["ssh-add", "-q", held], check=True)
    held.unlink()
    made = domain_key.create(key=public)
    assert {p.name for p in made.folder.iterdir()} == {domain_key.ELSEWHERE, domain_key.PUBLIC_FILE}
    again = domain_key.load()
    assert sshsig.holds(made.public, "uvcc-approval", b"text", again.sign("uvcc-approval", b"text"))
    subprocess.run(["ssh-add", "-q", "-d", public], check=True)
    with pytest.raises(UvccError, match="ssh-keygen does not sign") as refused:
        again.sign("uvcc-approval", b"text")
    assert "ssh-add -l" in refused.value.hint
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", held], check=True, input=b"y\n")
    subprocess.run(["ssh-add", "-q", held], check=True)
    with pytest.raises(UnreadableError, match="not the one that it publishes"):  # another key took its file's place
        again.sign("uvcc-approval", b"text")


@pytest.mark.skipif(not SOFTWARE_TOKEN.exists(), reason="OpenSSH's software token (openssh-tests) is not installed")
@pytest.mark.parametrize("in_agent", [False, True])
def test_a_key_in_a_token_signs_by_itself_or_through_the_agent(
    tmp_path: Path, agent: None, monkeypatch: pytest.MonkeyPatch, in_agent: bool
) -> None:
    held, public = tmp_path / "id", tmp_path / "id.pub"
    monkeypatch.setenv("SSH_SK_PROVIDER", str(SOFTWARE_TOKEN))
    made_by = ["ssh-keygen", "-q", "-t", "ed25519-sk", "-O", "no-touch-required", "-N", "", "-f", held]
    subprocess.run(made_by, check=True)
    if in_agent:
        subprocess.run(["ssh-add", "-q", held], check=True)
        held.unlink()
    made = domain_key.create(key=public if in_agent else held)
    assert made.public.startswith("sk-ssh-ed25519@openssh.com ")
    signed = domain_key.load().sign("uvcc-approval", b"text")
    assert sshsig.holds(made.public, "uvcc-approval", b"text", signed)
    assert not sshsig.holds(made.public, "uvcc-barrier", b"text", signed)
    assert len(domain_key.fingerprint(made.public).split()) == 6


def test_a_key_that_is_not_the_published_one_signs_nothing() -> None:
    made = domain_key.create()
    (made.folder / domain_key.PUBLIC_FILE).write_text(KEYS[0])
    with pytest.raises(UnreadableError, match="not the one that it publishes"):
        domain_key.load().sign("n", b"text")


def test_fingerprints_are_thirty_digits_and_differ() -> None:
    found = {domain_key.fingerprint(key) for key in KEYS}
    assert len(found) == len(KEYS)
    assert all(len(f.split()) == 6 and f.replace(" ", "").isdigit() and len(f) == 35 for f in found)


def test_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["domain", "show"]) == 2
    assert "uvcc domain init" in capsys.readouterr().err
    assert main(["domain", "init"]) == 0
    said = capsys.readouterr().out
    public = domain_key.load().public
    assert said.splitlines() == [public, f"fingerprint {domain_key.fingerprint(public)}"]
    assert main(["domain", "show", str(domain_key.folder() / domain_key.PUBLIC_FILE)]) == 0
    assert capsys.readouterr().out == said
    assert main(["domain", "init"]) == 2


def test_the_default_policy_that_is_written_is_the_default(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(site_policy.DEFAULT_TEXT)
    assert site_policy.load(path) == SitePolicy()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("min_bach: 3", "min_batch"),
        ("min_batch: many", "min_batch"),
        ("min_batch: -1", "negative"),
        ("hours: [20, 8]", "no part of a day"),
        ("hours: 8", "hours"),
        ("[1]", "policy.yaml"),
        ("a: [", "not YAML"),
        ("[" * 200, "YAML|deeply"),
    ],
)
def test_a_site_policy_is_strict(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    with pytest.raises(UvccError) as refused:
        site_policy.load(path)
    assert any(word in str(refused.value) for word in words.split("|"))


STRICT = SitePolicy(
    coordinators=(KEYS[4],), owners=(KEYS[3],), models=("mlp-digits",), code=("ab" * 32,), yes_for=(KEYS[4],)
)


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("domains", {"domains": (KEYS[5], KEYS[1], KEYS[2])}),
        ("coordinators", {"coordinator": KEYS[5]}),
        ("owners", {"owners": (KEYS[3], KEYS[5])}),
        ("owners", {"owners": (KEYS[5], KEYS[3])}),
        ("models", {"job": {**proposal().job, "model": {"layers": []}}}),
        ("code", {"code_hash": "00" * 32}),
        ("reveal", {"reveal": (*proposal().reveal, Revealed(value="seeds", to="all"))}),
        ("reveal", {"job": {**proposal().job, "reveal": ["loss", "accuracy", "auc"]}}),
        ("reveal", {"job": silent(), "reveal": (Revealed(value="loss", to="all"),)}),
        ("reveal_to_owner", {"reveal": (*proposal().reveal, Revealed(value="seeds", to="owner"))}),
        ("min_batch", {"job": {**proposal().job, "batch": 1}}),
        ("min_batch", {"job": {**proposal().job, "batch": "64"}}),
        ("min_rows", {"job": {**proposal().job, "test_rows": 2}}),
        ("max_hourly", {"limits": ProposedLimits(hourly=0.01, total=0.0, ttl_s=1.0)}),
        ("max_total", {"limits": ProposedLimits(hourly=0.0, total=0.01, ttl_s=1.0)}),
        ("max_hours", {"limits": ProposedLimits(hourly=0.0, total=0.0, ttl_s=13 * 3600.0)}),
        ("expires", {"expires": NOON - 1}),
    ],
)
def test_what_breaks_a_rule_is_refused_by_its_name(rule: str, changes: dict[str, Any]) -> None:
    found = evaluate(proposal(**changes), STRICT, KEYS[0], NOON)
    assert {name for name, _ in found.refused} == {rule}
    assert not found.yes


def test_hours_are_of_the_day() -> None:
    day = replace(STRICT, hours=(8, 12))
    assert [name for name, _ in evaluate(proposal(), day, KEYS[0], NOON).refused] == ["hours"]
    assert not evaluate(proposal(), day, KEYS[0], NOON - 1).refused


def test_inside_the_policy_a_person_decides_unless_it_says_otherwise() -> None:
    assert evaluate(proposal(), STRICT, KEYS[0], NOON) == site_policy.SiteJudgement((), yes=True)
    assert evaluate(proposal(), SitePolicy(), KEYS[0], NOON) == site_policy.SiteJudgement((), yes=False)


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"name": "A b"},
        {"code_hash": "x"},
        {"domains": (KEYS[0], KEYS[0], KEYS[2])},
        {"owners": ("ssh-rsa AAAA",)},
        {"coordinator": f"{KEYS[4]} comment"},
        {"expires": 0},
        {"limits": ProposedLimits(hourly=-1.0, total=0.0, ttl_s=1.0)},
        {"job": {"model": "x" * 40_000}},
    ],
)
def test_a_proposal_is_held_to_its_form(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        proposal(**changes)


def test_a_proposal_reads_as_it_was_written_and_in_no_other_spelling() -> None:
    whole = proposal()
    assert Proposal.from_bytes(whole.canonical) == whole
    assert Proposal.from_bytes(whole.canonical).id == whole.id
    for bad in (
        b"",
        b"{}",
        b" " + whole.canonical,
        whole.canonical.replace(b'"name":"digits"', b'"name":"digits","x":1'),
    ):
        with pytest.raises((ConfigError, UnreadableError)):
            Proposal.from_bytes(bad)


def test_a_certificate_is_found_from_wherever_a_conductor_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    add_relay(parser)
    monkeypatch.chdir(tmp_path)
    given = ["--relay", "https://x", "--token-file", "token"]
    assert parser.parse_args([*given, "--ca-file", "relay.pem"]).ca_file == str(tmp_path / "relay.pem")
    assert parser.parse_args(given).ca_file == ""


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"\x80", "is no domain's file: 'utf-8' codec"),
        (b"[]", "is no domain's file"),
        (b"[" * 100_000, "is no domain's file: nested too deeply"),
        (b"{}", "it has no 'party'"),
    ],
)
def test_what_is_no_domain_s_file_is_told(
    content: bytes, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "given").write_bytes(content)
    assert main(["domain", "join", str(tmp_path / "given")]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.timeout(60)
def test_a_domain_s_file_without_an_end_is_not_read_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    """It took all memory."""
    assert main(["domain", "join", "/dev/zero"]) == 2
    assert "/dev/zero is no domain's file: longer than" in capsys.readouterr().err


def test_of_a_run_of_three_domains_none_goes_on_alone() -> None:
    _, profile = load("demo", ["limits.resumes=1", "link=direct"])
    plan = make_plan("r-1", "demo", profile)
    proposed = proposal(job=dict(plan.phases["full"].job), topology=plan.phases["full"].topology)
    with pytest.raises(ConfigError, match=r"give limits\.resumes 0"):
        of_domain(plan, proposed, 0)
