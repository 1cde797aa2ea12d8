"""Three domains, three homes, three conductors, one relay: real pods, verified by somebody with public keys only."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "haltd"))
sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))
from demorun import Uvcc, user_at
from relaykit import TOKENS, relay_of
from transparency_log import Log, transparency_log

from uvcc_console.core.folding.state import fold
from uvcc_console.core.journal.journal import iter_events
from uvcc_console.core.snapshot import Snapshot
from uvcc_console.federation import domain_key
from uvcc_console.fleet.ssh_keys import KEY_FILE
from uvcc_console.runs import processes
from uvcc_engine.transcript.signed import barriers
from uvcc_engine.transcript.signed import roster as rosters

pytestmark = [pytest.mark.ci("tests/console/federation/test_peers.py"), pytest.mark.timeout(600)]
OWNER_TOKEN = "token-of-an-owner-0123456789"
OPENED = ("--set", "job.reveal=[loss, accuracy, weights]")
JOB = ("--set", "job.steps=5", "--set", "smoke.steps=0", "--set", "link=direct", "--set", "job.test_rows=200")


@dataclass
class Domains:
    """Three users who are domains, and their proposal."""

    users: list[Uvcc]
    url: str
    proposal: str = ""
    keys: list[Path] = field(default_factory=list)
    job: tuple[str, ...] = JOB
    wait_s: str = "120"
    to_owner: tuple[str, ...] = ()
    profile: str = "demo"
    """A shipped one, or a file that lies in each home."""

    def profile_of(self, n: int) -> str:
        own = self.users[n].home / self.profile
        return str(own) if own.exists() else self.profile

    def meets(self, n: int) -> list[str]:
        return ["--relay", self.url, "--token-file", str(self.users[n].home / "token")]

    def prepare(self, *owners: str) -> None:
        """Make the domains, and have all three approve a proposal; ``owners``: options that name data owners."""
        for n, user in enumerate(self.users):
            (user.home / "token").write_text(TOKENS[n])
            assert user.run("domain", "init").returncode == 0
            self.keys.append(user.home / "config" / "domain" / domain_key.PUBLIC_FILE)
        first = domain_key.read_public(self.keys[0])
        for user in self.users:
            rules = {"yes_for": [first], "reveal": ["loss", "accuracy", "weights"]}
            rules |= {"reveal_to_owner": list(self.to_owner)} if self.to_owner else {}
            (user.home / "config" / "domain" / "policy.yaml").write_text(json.dumps(rules))
        named = [part for key in self.keys for part in ("--domain", str(key))]
        done = self.users[0].run("propose", self.profile_of(0), *named, *owners, "--json", *self.job, *self.meets(0))
        assert done.returncode == 0, done.stderr
        self.proposal = str(json.loads(done.stdout)["proposal"])
        for n, user in enumerate(self.users):
            done = user.run("join", self.proposal, "--yes", *self.meets(n))
            assert done.returncode == 0, done.stderr

    def start(self, n: int, *args: str) -> subprocess.Popen[str]:
        of = ("--proposal", self.proposal, "--domain", "--headless", "--json", "--wait", self.wait_s)
        return self.users[n].start("rollout", self.profile_of(n), *of, *args, *self.meets(n), *self.job)

    def run_of(self, n: int) -> Path:
        """The newest run of a domain."""
        return max((self.users[n].home / "runs").iterdir(), key=lambda p: p.stat().st_mtime)

    def seen(self, n: int) -> Snapshot:
        return fold(event for _, event in iter_events(self.run_of(n) / processes.JOURNAL))


@pytest.fixture
def strangers(tmp_path: Path) -> Iterator[Domains]:
    """Three domains with homes of their own, at a relay that lets a data owner in, too."""
    people: list[dict[str, Any]] = [{"party": p, "group": "g", "token": t} for p, t in enumerate(TOKENS)]
    people.append({"owner": 0, "group": "g", "token": OWNER_TOKEN})
    with ExitStack() as stack:
        url = stack.enter_context(relay_of(tmp_path, people))
        homes = [tmp_path / f"p{n}" for n in range(3)]
        for home in homes:
            home.mkdir()
        yield Domains([stack.enter_context(user_at(home)) for home in homes], url)


@pytest.fixture
def owner(strangers: Domains, tmp_path: Path) -> Iterator[Uvcc]:
    """A data owner whom the domains' proposal names, and who pinned them."""
    with user_at(tmp_path / "owner") as user:
        user.home.mkdir()
        (user.home / "token").write_text(OWNER_TOKEN)
        assert user.run("owner", "init").returncode == 0
        strangers.job = (*JOB, *OPENED)
        strangers.prepare("--owner", str(user.home / "config" / "owner" / "owner.pub"))
        assert user.run("owner", "pin", *map(str, strangers.keys)).returncode == 0
        yield user


@pytest.fixture
def public(tmp_path: Path) -> Iterator[Log]:
    with transparency_log(tmp_path / "log") as made:
        yield made


def shared(owner: Uvcc, domains: Domains, running: list[subprocess.Popen[str]]) -> np.ndarray:
    """Have the owner share once the rosters are there; its rows."""
    x = np.random.default_rng(1).normal(size=(500, 64)).round(4)
    lines = [",".join(map(str, [*row, n % 10])) for n, row in enumerate(x.tolist())]
    (owner.home / "rows.csv").write_text("\n".join(lines) + "\n")
    meets = ("--relay", domains.url, "--token-file", str(owner.home / "token"))
    for _ in range(150):
        done = owner.run("owner", "share", domains.proposal, "--data", str(owner.home / "rows.csv"), "--yes", *meets)
        if done.returncode == 0 or any(process.poll() is not None for process in running):
            break
        assert "no signed roster" in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr
    assert "200 test rows, 300 train rows" in done.stdout
    return x


def everything(root: Path) -> Iterator[tuple[Path, bytes]]:
    for path in root.rglob("*"):
        if path.is_file() and not path.is_symlink():
            yield path, path.read_bytes()


def test_three_conductors_train_together_and_an_auditor_with_three_keys_verifies_it(
    strangers: Domains, owner: Uvcc, tmp_path: Path, public: Log
) -> None:
    domains = strangers
    entered = ("--set", f"evidence.log={public.url}", "--set", f"evidence.log_key={public.pem}")
    running = [domains.start(n, *(entered if n == 1 else ())) for n in range(3)]  # P1's domain publishes, for itself
    rows = shared(owner, domains, running)
    for n, process in enumerate(running):
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, (n, err[-3000:])
        assert json.loads(out)["verified"]
    for n in range(3):
        s = domains.seen(n)
        assert set(s.pods) == {f"p{n}r0"}  # it drove its own pods only, and gave them back
        assert all(pod.state == "gone" for pod in s.pods.values())
        assert set(s.domains) == {0, 1, 2} - {n}
        assert not domains.users[n].on_pods()
    _nobody_holds_what_is_anothers(domains, rows)
    _the_owner_opens_what_was_sealed_to_it(domains, owner, tmp_path / "results")

    package = tmp_path / "handed-over"
    shutil.copytree(domains.run_of(1) / "artifacts", package)
    pinned = [part for key in domains.keys for part in ("--domain", str(key))]
    with user_at(tmp_path / "auditor") as auditor:
        auditor.home.mkdir()
        done = auditor.run("verify", str(package), *pinned)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.startswith("identities vouched for by the three domains that were named\nVERIFIED")
        logged = auditor.run("verify", str(package), *pinned, "--log-key", str(public.pem))
        assert logged.returncode == 0, logged.stderr
        assert "logged       phase full: policy 20" in logged.stdout
        assert "driven       by these domains, each its own pods: 3 rosters" in done.stdout
        assert "owners       1 shared for this attempt" in done.stdout
        _what_was_altered_is_named(auditor, package, pinned)


def _the_owner_opens_what_was_sealed_to_it(domains: Domains, owner: Uvcc, out: Path) -> None:
    """It comes through the relay, is held against the receipt, and is nothing that the domains could open."""
    meets = ("--relay", domains.url, "--token-file", str(owner.home / "token"))
    done = owner.run("owner", "results", domains.proposal[:12], "--out", str(out), *meets)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "receipt      it is of the rows that this owner shared" in done.stdout
    with np.load(out / "weights.npz") as found:
        assert found["weight.0"].shape[0] == 64 + 1
    kept = next((owner.home / "config" / "owner" / "receipts").iterdir())
    bundle = kept / "results" / "full" / "proof_bundle.json"
    for path, content, words in (
        (kept / "results" / "owner-shares.json", b"[]", "owner 0 signed no statement of shares"),
        (kept / "results" / "rosters.json", b"[]", "P0's roster is not the one whose pods were sealed to"),
        (bundle, bundle.read_bytes().replace(b'"steps":5', b'"steps":6'), "signature"),
    ):
        before = path.read_bytes()
        path.write_bytes(content)
        handed = ("--from", str(kept / "results"), "--out", str(out / "again"))
        done = owner.run("owner", "results", domains.proposal[:12], *handed)
        assert done.returncode != 0
        assert words in done.stderr
        path.write_bytes(before)


def _nobody_holds_what_is_anothers(domains: Domains, rows: np.ndarray) -> None:
    """No domain holds a token, a domain key or the SSH key of another, the address of another's shell, or a row."""
    planted = [np.rint(row * 65536).astype("<i8").tobytes() for row in rows[:3]]
    planted += [",".join(map(str, row)).encode() for row in rows[:3].tolist()]
    secrets = {
        n: (
            TOKENS[n].encode(),
            (domains.keys[n].parent / domain_key.KEY_FILE).read_bytes().splitlines()[2],
            (domains.run_of(n) / KEY_FILE).read_bytes().splitlines()[2],
            domains.seen(n).pods[f"p{n}r0"].address.encode(),
        )
        for n in range(3)
    }
    for n, user in enumerate(domains.users):
        theirs = [*planted, *(secret for m, found in secrets.items() if m != n for secret in found)]
        for path, data in everything(user.home):
            assert not any(secret in data for secret in theirs), path


def _what_was_altered_is_named(auditor: Uvcc, package: Path, pinned: list[str]) -> None:
    rosters = json.loads((package / "rosters.json").read_text())
    barriers = json.loads((package / "barriers.json").read_text())
    full = next(b for b in barriers if '"stage":"full"' in b and '"party":2' in b)
    for name, content, words in (
        ("rosters.json", [b for b in rosters if '"party":2' not in b], "P2 signed no roster"),
        ("rosters.json", [b.replace('"region":"', '"region":"x') for b in rosters], "P0, P1, P2 signed no roster"),
        ("barriers.json", [b for b in barriers if b != full], "before P2 had reached full"),
    ):
        kept = (package / name).read_bytes()
        (package / name).write_text(json.dumps(content))
        done = auditor.run("verify", str(package / "full"), *pinned)
        assert done.returncode == 1, done.stdout + done.stderr
        assert words in done.stderr or "manifest" in done.stderr, done.stderr
        (package / name).write_bytes(kept)


def _an_early_end_needs_two(domains: Domains) -> None:
    """Two domains wait for the third; one has enough of it, and may end its part once both have signed for that."""
    running = [domains.start(n) for n in range(2)]
    runs = [begun(process) for process in running]
    for n, run in enumerate(runs):
        domains.users[n].events(run, lambda e: e["kind"] == "stage" and e["name"] == "meet")
        refused = domains.users[0].run("teardown", runs[0])
        assert refused.returncode == 2, refused.stderr
        assert f"terminate needs the signatures of 2 of 3 domains; signed by {('nobody', 'P0')[n]}" in refused.stderr
        assert "uvcc domain consent RUN terminate" in refused.stderr
        signed = domains.users[n].run("domain", "consent", run, "terminate")
        assert signed.returncode == 0, signed.stderr
    domains.users[0].events(runs[0], lambda e: (e["kind"], e.get("by")) == ("consent", "P1"))
    done = domains.users[0].run("teardown", runs[0])
    assert done.returncode == 0, done.stderr
    for process in running:
        assert process.wait(120) == 1
        process.communicate()
    assert [domains.seen(n).status for n in range(2)] == ["torn_down", "failed"]
    assert "P0's domain stopped at meet" in domains.seen(1).detail
    assert all(set(domains.seen(n).consents) == {("terminate", "P0"), ("terminate", "P1")} for n in range(2))


def test_a_domain_whose_conductor_is_killed_is_named_and_the_others_end_safe(strangers: Domains) -> None:
    domains = strangers
    domains.job = (*JOB, "--set", "consent.terminate=2")  # which asks nobody where a domain is gone
    domains.prepare()
    _an_early_end_needs_two(domains)
    running = [domains.start(n, "--silence", "20") for n in range(3)]
    domains.users[0].events(begun(running[0]), lambda e: e["kind"] == "phase")
    victim = processes.recorded(domains.run_of(2), processes.CONDUCTOR)
    assert victim is not None
    os.kill(victim.pid, signal.SIGKILL)
    states = []
    for n in range(2):
        out, _ = running[n].communicate(timeout=300)
        assert running[n].returncode == 1, out
        s = domains.seen(n)
        assert s.status == "failed"
        assert "P2's domain vanished" in s.detail, s.detail
        states.append(s.domains[2].status)
        assert all(pod.state == "gone" for pod in s.pods.values())
        assert not domains.users[n].on_pods()
        assert s.hourly == 0.0
        for name in (rosters.FILE, barriers.FILE):  # whatever a domain signed convicts it though the run failed
            assert json.loads((domains.run_of(n) / "artifacts" / name).read_text())
    assert "silent" in states  # the other one may have been told of it by the first one's stop
    running[2].communicate(timeout=300)
    end = time.monotonic() + 100.0  # until its sidecar ends it, nothing conducts it that could be followed
    while not (left := domains.seen(2)).ended:
        assert time.monotonic() < end, left.detail
        time.sleep(0.1)
    assert left.leaks == ()  # its own sidecar ended what its conductor left
    assert not domains.users[2].on_pods()


def begun(process: subprocess.Popen[str]) -> str:
    """The name of the run that a conductor has begun."""
    assert process.stderr is not None
    line = process.stderr.readline()
    assert line.startswith("run "), line + process.communicate()[1]
    return line.split()[1]
