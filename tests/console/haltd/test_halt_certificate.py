"""Halt certificates: signed, cited, readable by ssh-keygen; a resume goes on only where the halt left it."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal
from uvcc_console.halt import certificate
from uvcc_console.halt.machine import PodEvidence
from uvcc_console.haltd.halter import Halter
from uvcc_console.plan.plan import make_plan
from uvcc_console.plan.profile import load
from uvcc_console.rollout.context import Member
from uvcc_console.rollout.stages.training import phases
from uvcc_console.runs import processes
from uvcc_engine.contract.agent_protocol.agent_commands import Command
from uvcc_engine.contract.agent_protocol.agent_messages import Ack, HaltStage
from uvcc_engine.contract.errors import UvccError, VerificationError

HASHES = {f"p{p}r0": f"{p:x}" * 64 for p in range(3)}
PODS = {pod: PodEvidence("gone", True, {f"{pod}s0t0": 7}, {f"{pod}s0t0": h}) for pod, h in HASHES.items()}
DONE = ev.HaltDone(nonce="ab12", mode="halt", verified=3, total=3, step=7, seconds=0.5)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "demo-1"
    folder.mkdir()
    return folder


def say(run_dir: Path, *events: ev.Event) -> None:
    journal = Journal(run_dir / processes.JOURNAL, source="test")
    journal.append(*events)
    journal.close()


def issued(run_dir: Path) -> certificate.HaltCertificate:
    made = certificate.issue(run_dir, DONE, "demo-1.full", PODS, at=1000.0)
    say(run_dir, ev.HaltDone(**{**ev.to_json(DONE), "certificate": made.sha256}))
    return made


def started(**more: Any) -> ev.PhaseStarted:
    return ev.PhaseStarted(phase="full", engine_run="demo-1.full", steps=9, sid_job="", **more)


def listing(step: int, sha: str) -> str:
    return f"{sha}  step-{step}/MANIFEST.json\n"


def test_a_certificate_is_in_force_until_workers_start_again(run_dir: Path) -> None:
    say(run_dir, started())
    assert certificate.in_force(run_dir) is None
    made = issued(run_dir)
    assert certificate.in_force(run_dir) == made
    assert made.pods == PODS
    drill = ev.HaltDone(nonce="d", mode="hold", verified=3, total=3, step=8, seconds=0.1, drill=True)
    say(run_dir, drill)
    assert certificate.in_force(run_dir) == made
    say(run_dir, started(attempt=1, certificate=made.sha256))
    assert certificate.in_force(run_dir) is None


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="OpenSSH is not installed")
def test_openssh_verifies_the_certificate(run_dir: Path) -> None:
    issued(run_dir)
    folder = run_dir / "artifacts"
    command = ["ssh-keygen", "-Y", "verify", "-f", certificate.SIGNERS, "-I", "operator"]
    command += ["-n", certificate.NAMESPACE, "-s", "halt-ab12.json.sig"]
    payload = (folder / "halt-ab12.json").read_bytes()
    good = subprocess.run(command, cwd=folder, input=payload, capture_output=True, check=False)
    assert good.returncode == 0, good.stderr
    bad = subprocess.run(command, cwd=folder, input=payload.replace(b'"step":7', b'"step":8'), check=False)
    assert bad.returncode != 0


def forge(run_dir: Path) -> None:
    path = run_dir / "artifacts" / "halt-ab12.json"
    path.write_bytes(path.read_bytes().replace(b'"step":7', b'"step":8'))


def sign_with_another_key(run_dir: Path) -> None:
    other = run_dir.parent / "other" / "demo-1"
    other.mkdir(parents=True)
    certificate.issue(other, DONE, "demo-1.full", PODS, at=1000.0)
    for name in ("halt-ab12.json", "halt-ab12.json.sig"):
        shutil.copy(other / "artifacts" / name, run_dir / "artifacts" / name)


def lose(run_dir: Path) -> None:
    (run_dir / "artifacts" / "halt-ab12.json").unlink()


@pytest.mark.parametrize(
    ("injure", "text"),
    [(forge, "not the one that the journal cites"), (sign_with_another_key, "cites"), (lose, "cannot read")],
)
def test_a_cited_certificate_that_does_not_hold_is_refused(run_dir: Path, injure: Any, text: str) -> None:
    issued(run_dir)
    injure(run_dir)
    with pytest.raises(VerificationError, match=text):
        certificate.in_force(run_dir)


def test_a_signature_by_another_key_does_not_hold_even_uncited(run_dir: Path) -> None:
    issued(run_dir)
    sign_with_another_key(run_dir)
    with pytest.raises(VerificationError, match="does not bear this run's signature"):
        certificate.read(run_dir, "ab12")


def test_only_the_very_checkpoint_of_the_halt_matches() -> None:
    good, wanted = HASHES["p1r0"], PODS["p1r0"]
    assert certificate.mismatch("p1r0", wanted, listing(3, "e" * 64) + listing(7, good)) == ""
    assert "there is none" in certificate.mismatch("p1r0", wanted, "")
    assert "its last is of step 6" in certificate.mismatch("p1r0", wanted, listing(6, good))
    assert "certified was 111111111111" in certificate.mismatch("p1r0", wanted, listing(7, "f" * 64))
    assert "has a checkpoint of step 8" in certificate.mismatch("p1r0", wanted, listing(7, good) + listing(8, good))
    assert certificate.mismatch("p1r0", PodEvidence("gone", True, {}, {}), "") == ""  # a command owes none


class Link:
    """A pod on which the listing says what it is told."""

    def __init__(self, text: str) -> None:
        self.text = text

    async def sh(self, command: str) -> str:
        assert "runs/demo-1.full/checkpoints" in command
        return self.text


@pytest.mark.parametrize("changed", ["", "p2r0"])
async def test_a_resume_cites_the_certificate_or_refuses(run_dir: Path, changed: str) -> None:
    made = issued(run_dir)
    _, profile = load("demo")
    plan = make_plan("demo-1", "demo", profile)

    class Context:
        members = {name: Member(name, request) for name, request in plan.requests.items()}  # noqa: RUF012

        def of_phase(self, phase: object) -> list[Member]:
            return list(self.members.values())

    ctx: Any = Context()
    ctx.run_dir = run_dir
    for name, member in ctx.members.items():
        member.link = Link(listing(7, "f" * 64 if name == changed else HASHES[name]))
    if not changed:
        assert await phases.cited_certificate(ctx, plan.phases["full"]) == made.sha256
        assert await phases.cited_certificate(ctx, plan.phases["smoke"]) == ""  # of another engine run
        return
    with pytest.raises(VerificationError, match=r"does not hold: p2r0's checkpoint of step 7 is f{12}") as refused:
        await phases.cited_certificate(ctx, plan.phases["full"])
    assert "put p2r0's checkpoints back" in refused.value.hint


class Silent:
    """A channel that takes everything."""

    up = True

    def post(self, command: Command, *, nonce: str) -> asyncio.Future[Ack] | None:
        return None


@pytest.mark.parametrize(
    ("drill", "proven", "full_disk"),
    [(False, True, False), (False, False, False), (True, True, False), (False, True, True)],
)
async def test_only_a_real_halt_with_every_pod_verified_is_certified(
    run_dir: Path, drill: bool, proven: bool, full_disk: bool
) -> None:
    events: list[ev.Event] = []

    def certify(done: ev.HaltDone, engine_run: str, pods: Any) -> str:
        if full_disk:
            raise UvccError("disk full", "free space")
        return certificate.issue(run_dir, done, engine_run, pods, at=1.0).sha256

    halter = Halter({p: Silent() for p in ("p0r0", "p1r0")}, events.extend, certify=certify)
    asked = ev.HaltRequested(nonce="n1", mode="hold" if drill else "halt", by="t", drill=drill)
    halter.request(asked, "demo-1.full", {"p0r0": 1, "p1r0": 1})
    stages = ("held", "released") if drill else ("gone",)
    for stage in stages:
        for pod in ("p0r0", "p1r0"):
            lost = not proven and pod == "p1r0"
            said = HaltStage(
                run="demo-1.full",
                nonce="n1",
                stage=stage,
                coord=f"{pod}s0t0",
                step=4,
                checkpoint="" if lost else "c" * 64,
                detail="ended by SIGKILL" if lost else "",
            )
            halter.message(pod, said)
    (done,) = [e for e in events if isinstance(e, ev.HaltDone)]
    if drill or not proven or full_disk:
        assert done.certificate == ""
        assert not list(run_dir.glob("artifacts/halt-*"))
        return
    body = json.loads((run_dir / "artifacts" / "halt-n1.json").read_text())
    assert certificate.read(run_dir, "n1", done.certificate).step == 4
    assert body["pods"]["p1r0"] == {
        "stage": "gone",
        "gone": True,
        "steps": {"p1r0s0t0": 4},
        "checkpoints": {"p1r0s0t0": "c" * 64},
    }
