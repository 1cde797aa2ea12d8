"""Three domains rehearse the halt, one of them halts all, and they go on only once as many signed as was proposed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "haltd"))
sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))
from demorun import PATIENT, user_at
from test_federated_run import Domains, strangers  # noqa: F401

from uvcc_console.core.snapshot import Snapshot
from uvcc_engine.contract.errors import VerificationError
from uvcc_engine.transcript.proof import approval_check
from uvcc_engine.transcript.proof import package as package_of

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
JOB = ("job.steps=80", "job.test_rows=200", "smoke.steps=3", "link=direct", "consent.resume=2", "consent.full=1")


def until(domains: Domains, n: int, wanted: Callable[[Snapshot], bool], running: subprocess.Popen[str]) -> Snapshot:
    """A domain's run once its journal shows this."""
    end = time.monotonic() + 240.0
    while not wanted(s := domains.seen(n)):
        assert running.poll() is None, (s.detail, running.communicate()[1][-3000:])
        assert time.monotonic() < end, (s.stage, s.detail, s.consents)
        time.sleep(0.2)
    return s


def at(stage: str, status: str) -> Callable[[Snapshot], bool]:
    return lambda s: s.stage is not None and (s.stage.name, s.stage.status) == (stage, status)


def test_what_needs_the_word_of_two_domains_waits_for_two_and_an_auditor_counts_them(
    strangers: Domains,  # noqa: F811
    tmp_path: Path,
) -> None:
    domains = strangers
    domains.job = tuple(part for key in (*JOB, *PATIENT) for part in ("--set", key))
    domains.prepare()
    running = [domains.start(n) for n in range(3)]
    for process in running:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("run ")
    runs = [domains.run_of(n).name for n in range(3)]
    s = until(domains, 0, at("full", "waiting"), running[0])
    assert s.stage is not None
    assert "full needs the signatures of 1 of 3 domains" in s.stage.detail
    assert [(v.name, v.status) for v in s.stages if v.name == "drill"] == [("drill", "ok")]
    assert s.halt.last_drill_s is not None
    early = domains.users[0].run("domain", "consent", runs[0], "resume")
    assert early.returncode != 0
    assert "there is nothing to sign resume for now" in early.stderr
    signed = domains.users[1].run("domain", "consent", runs[1], "full")
    assert signed.returncode == 0, signed.stderr

    until(domains, 1, lambda s: s.phase == "full" and s.step >= 2, running[1])
    halted = domains.users[1].run("halt", runs[1], "--now")
    assert halted.returncode == 0, halted.stderr
    steps = {until(domains, n, at("full", "waiting"), running[n]).halt.step for n in range(3)}
    assert len(steps) == 1
    assert 0 < steps.pop() < 80

    alone = domains.users[0].run("resume", runs[0], "--timeout", "5")
    assert alone.returncode != 0
    until(domains, 2, lambda s: ("resume-1", "P0") in s.consents, running[2])
    assert [domains.seen(n).resumes for n in range(3)] == [0, 0, 0]  # one word is not two
    for refused in (("--from", "0"), ("--retry",)):
        done = domains.users[0].run("resume", runs[0], *refused)
        assert done.returncode != 0
        assert "one domain alone does not choose where three go on" in done.stderr
    second = domains.users[2].run("resume", runs[2])
    assert second.returncode == 0, second.stderr
    for n, process in enumerate(running):
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, (n, err[-3000:])
        assert json.loads(out)["verified"]
        s = domains.seen(n)
        assert s.resumes == 1
        assert {("resume-1", "P0"), ("resume-1", "P2"), ("full", "P1")} == set(s.consents)
        assert not domains.users[n].on_pods()
    _an_auditor_counts(domains, tmp_path)


def _an_auditor_counts(domains: Domains, tmp_path: Path) -> None:
    package = tmp_path / "handed-over"
    shutil.copytree(domains.run_of(1) / "artifacts", package)
    pinned = [part for key in domains.keys for part in ("--domain", str(key))]
    with user_at(tmp_path / "auditor") as auditor:
        auditor.home.mkdir()
        done = auditor.run("verify", str(package), *pinned)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "consented    full by P1; resume-1 by P0, P2" in done.stdout
    kept: list[str] = json.loads((package / "consents.json").read_text())
    assert len(kept) == 3
    keys = approval_check.read_keys(domains.keys)
    without = [body for body in kept if not ('"resume"' in body and '"party":2' in body)]
    other = [body.replace('"number":1', '"number":2') for body in kept]
    for content, words in (
        (without, "resume-1 needed the word of 2 domains; signed by P0"),
        (other, "resume-1 needed the word of 2 domains; signed by nobody"),
        ([body for body in kept if '"full"' not in body], "full needed the word of 1 domains; signed by nobody"),
        ([], "full needed the word of 1 domains; signed by nobody"),
    ):
        (package / "consents.json").write_text(json.dumps(content))
        with pytest.raises(VerificationError, match=words):
            approval_check.check(package_of.find(package), keys)
