"""A run folder as a finished rollout leaves it: a journal, and the evidence of three pods with their logs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal
from uvcc_console.report.recheck import digests
from uvcc_engine.bench.work.rehearsal import VALUES, Rehearsal, rehearse
from uvcc_engine.contract.job.topology import Topology
from uvcc_engine.transcript.terms.commit_record import NAMESPACE, RECORDS, Statement

START = 1_700_000_000.0
RUN = "demo-20231114-2213-ab12"
STEPS = 3


def make_run(run_dir: Path, topology: Topology | None = None) -> Rehearsal:
    """Write the run; returns its full phase's evidence. Pods are p0r0..; transcripts lie in their folders."""
    size = topology or Topology()
    full = run_dir / "artifacts" / "full"
    full.mkdir(parents=True)
    made = rehearse(full, topology=size, steps=STEPS, ops=2)
    for party in range(3):
        (full / f"pod{party}").rename(full / f"p{party}r0")
        _pod_files(full / f"p{party}r0", party)
    committed(made, full)
    for pod in sorted(full.glob("p?r0")):
        sent_by(pod)
    journal = Journal(run_dir / "journal.sqlite", source="test")
    journal.append(*story(made, size, run_dir))
    journal.close()
    return made


def _pod_files(folder: Path, party: int) -> None:
    losses = [VALUES["loss"] + left / 3.0 for left in reversed(range(STEPS))]  # as the rehearsal signs them
    rows = "".join(f"{i + 1},{loss:.9g},0.1,0,{100 + party}\n" for i, loss in enumerate(losses))
    (folder / "training.csv").write_text("step,loss,lr,toks_per_s,samples_per_s\n" + rows)
    events = [{"ts": START + 20, "seq": 1, "level": "info", "event": "party_start", "fields": {"party": party}}]
    (folder / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    (folder / f"worker_p{party}r0s0t0.log").write_text("listening\ntraining 3 steps\n")
    (folder / "run.info").write_text(f"run: {RUN}.full\ndevice: cpu\nmodel: mlp-digits\n")
    (folder / "run.json").write_text("{}")


def manifest_of(party: int) -> str:
    """SHA-256 of a party's checkpoint manifest of the last step."""
    return hashlib.sha256(b"manifest %d" % party).hexdigest()


def committed(made: Rehearsal, full: Path) -> None:
    """A real COMMIT record of the last step in every pod's folder."""
    component = [hashlib.sha256(b"component %d" % i).hexdigest() for i in range(3)]
    parties = []
    for p in range(3):
        held = component[p], component[(p + 1) % 3]
        said = Statement(f"p{p}r0s0t0", made.policy.sid_job.hex(), STEPS, manifest_of(p), held)
        signature = made.identities[p].sign(NAMESPACE, said.payload)
        more = {"manifest": said.manifest, "components": list(held), "signature": signature}
        parties.append({"coord": said.coord, **more})
    record = {"sid_job": made.policy.sid_job.hex(), "step": STEPS, "parties": parties}
    for p in range(3):
        (full / f"p{p}r0" / RECORDS).write_text(json.dumps(record) + "\n")


def sent_by(folder: Path) -> None:
    """Note every file's checksum, as the console does when it fetches them from a pod."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "SHA256SUMS")
    sums = (f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.relative_to(folder).as_posix()}\n" for p in files)
    (folder / "SHA256SUMS").write_text("".join(sums))


def story(made: Rehearsal, size: Topology, run_dir: Path) -> list[ev.Event]:
    """The journal of a run that went well, one second apart."""
    found: list[ev.Event] = [
        ev.RunCreated(
            run=RUN,
            profile_name="demo",
            job_kind="private",
            replicas=size.replicas,
            pipeline_stages=size.stages,
            tensor=size.tensor,
            stages=["provision", "preflight", "full", "verify-full", "teardown"],
            profile={"job": {"kind": "private", "steps": STEPS}, "fleet": {"provider": "local", "api_key": "hidden"}},
        )
    ]
    for p in range(3):
        common: dict[str, Any] = {"pod": f"p{p}r0", "party": p, "replica": 0, "provider": "local"}
        found.append(ev.PodChanged(**common, state="booting", address=f"pod@127.0.0.1:{2200 + p}"))
        found.append(ev.PodChanged(**common, state="agent", identity=made.policy.public(p).ed25519))
        found.append(ev.EngineEvent(pod=f"p{p}r0", level="info", event="dp_preflight_ok", fields={"cpus": 2}))
    sid = made.policy.sid_job.hex()
    found.append(ev.PhaseStarted(phase="full", engine_run=f"{RUN}.full", steps=STEPS, sid_job=sid))
    bundle = json.loads(made.bundle.read_text())
    for worker in bundle["workers"]:
        coord, party = worker["coord"], int(worker["coord"][1])
        pod = f"p{party}r0"
        found.append(ev.WorkerProcess(pod=pod, coord=coord, state="started", pid=10 + party))
        found.append(ev.HeartbeatRead(pod=pod, coord=coord, record={"step": 1, "phase": "train"}))
        for step in range(STEPS):
            found.append(ev.Metric(coord=coord, step=step, values={"loss": 1.0 / (step + 1), "samples_per_s": 100.0}))
        for signed in worker["roots"]:
            s = signed["statement"]
            found.append(ev.RootReported(coord=coord, epoch=s["epoch"], root=s["root"]))
        result = bundle["result_hashes"][0]
        found.append(ev.ResultReported(pod=pod, coord=coord, phase="full", result_hash=result, values=VALUES))
        if coord.endswith("r0s0t0"):
            fields = {"step": STEPS, "sha256": manifest_of(party)}
            found.append(ev.EngineEvent(pod=pod, level="info", event="checkpoint_written", fields=fields))
        found.append(ev.WorkerProcess(pod=pod, coord=coord, state="exited", rc=0))
    top = bundle["epochs"][-1]["global_root"]
    where = str(run_dir / "artifacts/full/proof_bundle.json")
    found.append(
        ev.PhaseVerdict(
            phase="full",
            ok=True,
            global_root=top,
            sid_job=sid,
            bundle=where,
            values=VALUES,
            result_hashes=bundle["result_hashes"],
            run_root=bundle["run_root"],
            level="transcripts",
            pinned=True,
            files=digests(run_dir / "artifacts" / "full"),
        )
    )
    for p in range(3):
        found.append(ev.PodChanged(pod=f"p{p}r0", party=p, replica=0, provider="local", state="gone"))
    found.append(ev.RunEnded(status="ok"))
    return [_at(e, START + i) for i, e in enumerate(found)]


def _at(event: ev.Event, ts: float) -> ev.Event:
    import dataclasses

    return dataclasses.replace(event, ts=ts)
