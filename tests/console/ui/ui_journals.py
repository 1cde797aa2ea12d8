"""Hand-made runs for the console's tests: the events a rollout would write, at fixed times."""

from __future__ import annotations

import hashlib
import math
import random
from dataclasses import dataclass, field
from pathlib import Path

from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal

T0 = 1_795_223_700.0  # 2026-11-21 01:15:00 UTC
STAGES = [
    "plan",
    "quote",
    "provision",
    "bootstrap",
    "preflight",
    "drill",
    "smoke",
    "verify-smoke",
    "gate",
    "full",
    "verify-full",
    "collect",
    "teardown",
]
RUN = "demo-20261121-0115-ab12"


def digest(*parts: object) -> str:
    """A stable hash for made-up roots."""
    return hashlib.sha256("/".join(map(str, parts)).encode()).hexdigest()


@dataclass(repr=False)
class Story:
    """Collects events on its own clock."""

    replicas: int = 1
    steps: int = 200
    price: float = 0.0
    provider: str = "local"
    now: float = T0
    events: list[ev.Event] = field(default_factory=list)
    seed: int = 7

    def __post_init__(self) -> None:
        self.rnd = random.Random(self.seed)
        self.coords = [f"p{p}r{r}s0t0" for r in range(self.replicas) for p in range(3)]

    def __repr__(self) -> str:
        return f"Story of {len(self.events)} events"

    def pod(self, coord: str) -> str:
        """The pod of a worker: one per party and replica."""
        return coord.split("s")[0]

    def add(self, event: ev.Event, after: float = 0.0) -> None:
        self.now += after
        object.__setattr__(event, "ts", self.now)
        self.events.append(event)

    def planned(self) -> Story:
        profile = {"job": {"kind": "private", "model": "mlp-digits", "batch": 64}, "limits": {"total": 0}}
        if self.price:
            profile["limits"] = {"hourly": 60, "total": 120}
        self.add(
            ev.RunCreated(
                run=RUN, profile_name="mlp-digits", job_kind="private", replicas=self.replicas, pipeline_stages=1,
                tensor=1, stages=list(STAGES), profile=profile,
            )
        )  # fmt: skip
        for coord in self.coords:
            self.add(self.pod_event(coord, "planned"))
        for name in ("plan", "quote"):
            self.stage(name, 0.1)
        return self

    def pod_event(self, coord: str, state: str, detail: str = "") -> ev.PodChanged:
        return ev.PodChanged(
            pod=self.pod(coord), party=int(coord[1]), replica=int(coord.split("r")[1].split("s")[0]),
            provider=self.provider, state=state, price_hr=self.price, detail=detail,
        )  # fmt: skip

    def stage(self, name: str, seconds: float, status: str = "ok", detail: str = "") -> None:
        self.add(ev.StageChanged(name=name, status="running"))
        self.add(ev.StageChanged(name=name, status=status, detail=detail), seconds)

    def provisioning(self) -> Story:
        self.planned()
        self.add(ev.StageChanged(name="provision", status="running"), 0.1)
        for i, coord in enumerate(self.coords):
            self.add(self.pod_event(coord, "creating"), 0.05)
            if i < len(self.coords) - 1:
                self.add(self.pod_event(coord, "ready"), 0.4)
        return self

    def launched(self) -> Story:
        self.provisioning()
        self.add(self.pod_event(self.coords[-1], "ready"), 0.4)
        self.add(ev.StageChanged(name="provision", status="ok", detail=f"{len(self.coords)} pods"))
        self.add(ev.StageChanged(name="bootstrap", status="running"), 0.1)
        for coord in self.coords:
            self.add(self.pod_event(coord, "agent"), 0.3)
            for path in ("ssh", "relay", "lease"):
                self.add(ev.LinkChanged(pod=self.pod(coord), path=path, up=True))
        self.add(ev.StageChanged(name="bootstrap", status="ok"))
        self.stage("preflight", 0.8, detail="python, torch, disk, clock")
        if self.price:
            self.cost(0.02)
        return self

    def cost(self, hours: float) -> None:
        hourly = self.price * len(self.coords)
        self.add(ev.CostTick(hourly=hourly, spent=hourly * hours, forecast=hourly * 0.6, runway_h=9.5))

    def phase(self, name: str, steps: int, attempt: int = 0) -> Story:
        self.phase_name = name
        self.add(ev.StageChanged(name=name, status="running"), 0.1)
        self.add(
            ev.PhaseStarted(
                phase=name, engine_run=f"{RUN}.{name}", steps=steps, sid_job=digest("sid", name), attempt=attempt
            )
        )
        for i, coord in enumerate(self.coords):
            self.add(ev.WorkerProcess(pod=self.pod(coord), coord=coord, state="started", pid=4200 + i))
            self.add(
                ev.EngineEvent(
                    pod=self.pod(coord), level="info", event="link_up", fields={"kind": "relay", "peer": (i + 1) % 3}
                )
            )
        return self

    def loss(self, step: int) -> float:
        return 0.09 + 2.2 * math.exp(-step / 38) + 0.05 * (1 - step / (step + 60)) * self.rnd.random()

    def train(self, first: int, last: int, seconds: float = 0.12, *, fork_at: int = -1) -> Story:
        for step in range(first, last + 1):
            loss = self.loss(step)
            self.now += seconds
            rate = 64 / (seconds * self.rnd.uniform(0.9, 1.1))
            for i, coord in enumerate(self.coords):
                mine = loss if self.replicas == 1 else loss * (1 + 0.06 * (i // 3) / self.replicas)
                record = {
                    "rank": i // 3,
                    "step": step,
                    "phase": "train",
                    "loss": mine,
                    "samples_per_s": rate,
                    "mem_mib": 168 + i,
                }
                self.add(ev.HeartbeatRead(pod=self.pod(coord), coord=coord, record=record), 0.002)
                values = {"loss": mine, "lr": 0.1 * min(1, step / 10), "samples_per_s": rate * (1 + 0.01 * i)}
                self.add(ev.Metric(coord=coord, step=step, values=values))
                self.root(coord, step, forked=step == fork_at and coord == self.coords[1])
                if step % 10 == 0:
                    accuracy = 0.1 + 0.86 * (1 - math.exp(-step / 30))
                    self.add(ev.Metric(coord=coord, step=step, values={"accuracy": accuracy}, split="val"))
            if step % 20 == 0:
                for coord in self.coords[:3]:
                    fields = {"step": step, "sha256": digest("ckpt", coord, step)[:12]}
                    self.add(
                        ev.EngineEvent(pod=self.pod(coord), level="info", event="checkpoint_written", fields=fields)
                    )
        return self

    def root(self, coord: str, step: int, *, forked: bool = False) -> None:
        p, rest = int(coord[1]), coord[2:]
        pairs = {}
        for q in range(3):
            if q != p:
                pairs[f"p{q}{rest}"] = digest(
                    "pair", min(p, q), max(p, q), rest, step, "x" if forked and q == 2 else ""
                )
        self.add(ev.RootReported(coord=coord, epoch=step, root=digest("root", coord, step), pairs=pairs))

    def halt(
        self,
        mode: str = "halt",
        *,
        nonce: str = "7c01f3a9d2e4b856",
        step: int = 17,
        drill: bool = False,
        unknown: int = 0,
        acks: bool = True,
    ) -> Story:
        by = "rollout" if drill else "ada@ops tui"
        self.add(ev.HaltRequested(nonce=nonce, mode="hold", by=by, drill=drill), 0.05)
        if not acks:
            return self
        start = self.now
        for stage in ("sent", "seen", "held"):
            for i, coord in enumerate(self.coords):
                if i >= len(self.coords) - unknown:
                    continue
                self.add(
                    ev.HaltAck(pod=self.pod(coord), nonce=nonce, stage=stage, step=step if stage == "held" else -1),
                    0.03,
                )
        if mode == "halt":
            self.add(ev.HaltRequested(nonce=nonce, mode="halt", by=by, drill=drill), 0.3)
            for i, coord in enumerate(self.coords):
                if i >= len(self.coords) - unknown:
                    self.add(
                        ev.HaltAck(pod=self.pod(coord), nonce=nonce, stage="unknown", detail="no answer for 4 s"), 0.2
                    )
                    continue
                self.add(ev.HaltAck(pod=self.pod(coord), nonce=nonce, stage="halted", step=step), 0.06)
                record = {"rank": i // 3, "step": step, "phase": "halted", "halt_nonce": nonce}
                self.add(ev.HeartbeatRead(pod=self.pod(coord), coord=coord, record=record))
                self.add(ev.WorkerProcess(pod=self.pod(coord), coord=coord, state="exited", rc=0))
                proved = digest("c", coord)
                self.add(ev.HaltAck(pod=self.pod(coord), nonce=nonce, stage="gone", step=step, checkpoint=proved), 0.02)
            verified = len(self.coords) - unknown
            self.add(
                ev.HaltDone(
                    nonce=nonce,
                    mode="halt",
                    verified=verified,
                    total=len(self.coords),
                    step=step,
                    seconds=self.now - start,
                    drill=drill,
                )
            )
            for coord in self.coords[: len(self.coords) - unknown]:
                gpu = "empty" if self.price else "none"
                self.add(ev.HaltAck(pod=self.pod(coord), nonce=nonce, stage="gone", detail="GPU empty", gpu=gpu), 0.01)
        if mode == "release":
            self.add(ev.HaltRequested(nonce=nonce, mode="release", by=by, drill=drill), 0.1)
            for coord in self.coords:
                self.add(ev.HaltAck(pod=self.pod(coord), nonce=nonce, stage="released", step=step), 0.02)
            self.add(
                ev.HaltDone(
                    nonce=nonce,
                    mode="release",
                    verified=len(self.coords),
                    total=len(self.coords),
                    step=step,
                    seconds=self.now - start,
                    drill=drill,
                )
            )
        return self

    def smoke(self) -> Story:
        self.launched().phase("smoke", 2).train(1, 1, 0.3)
        self.add(ev.StageChanged(name="drill", status="running"))
        self.halt("release", nonce="d0d0d0d0d0d0d0d0", step=1, drill=True)
        self.add(ev.StageChanged(name="drill", status="ok", detail="3/3 held and released at step 1 in 0.4 s"))
        self.train(2, 2, 0.3)
        self.add(ev.StageChanged(name="smoke", status="ok", detail="2 steps"), 0.2)
        self.add(ev.StageChanged(name="verify-smoke", status="running"))
        self.add(
            self.verdict("smoke", {"loss": 2.2}),
            0.4,
        )
        self.add(ev.StageChanged(name="verify-smoke", status="ok"))
        self.add(ev.StageChanged(name="gate", status="running"))
        self.add(ev.GateMeasured(name="loss_falls", ok=True, wanted="< 2.30", measured="2.21"))
        self.add(ev.GateMeasured(name="result_hashes", ok=True, wanted="1", measured="1"))
        self.add(ev.GateMeasured(name="halt_drill_s", ok=True, wanted="<= 5 s", measured="0.4 s"))
        self.add(ev.StageChanged(name="gate", status="ok"), 0.1)
        return self

    def full(self, upto: int = 40, **options: int) -> Story:
        self.smoke().phase("full", self.steps).train(1, upto, **options)
        if self.price:
            self.cost(0.21)
        return self

    def hanging(self, step: int = 30) -> Story:
        """One rank of the second replica does not come to a collective; its flight recorders have been read."""
        late = self.coords[4]
        for i, coord in enumerate(self.coords):
            mine = coord[1] == late[1]
            at = {"group": "dp", "op": "all_reduce", "seq": 1841, "state": "started" if mine else "completed"}
            record = {"rank": i // 3, "step": step, "phase": "train", "mem_mib": 168 + i, "last_collective": at}
            if coord == late:
                record["last_collective"] = {**at, "op": "all_gather", "seq": 1840, "state": "completed"}
            elif coord[:1] + coord[2:] == late[:1] + late[2:]:
                record |= {"waiting_on": late[:2], "waiting_s": 4.1}
            self.add(ev.HeartbeatRead(pod=self.pod(coord), coord=coord, record=record), 0.002)
        waited = {"coord": self.coords[0], "peer": 1, "since_s": 2.4, "silent_s": 0.1, "retransmits": 0}
        self.add(ev.EngineEvent(pod=self.pod(self.coords[0]), level="warn", event="waiting", fields=waited), 0.2)
        newest = {c: "dp 0 1 2 3 #1841 all_reduce, started, 4.3 s old" for c in self.coords if c[1] == late[1]}
        newest[late] = "dp 0 1 2 3 #1840 all_gather, completed, 4.4 s old"
        said = f"p1 dp 0 1 2 3: nothing moved for 4 s; {late} is at #1840 all_gather, the others at #1841 all_reduce"
        self.add(ev.FlightRead(folder="artifacts/flight/full-5d0c2e71", newest=newest, findings=[said]), 0.4)
        return self

    def halted(self, unknown: int = 0) -> Story:
        self.full(40).halt(step=40, unknown=unknown)
        self.add(ev.StageChanged(name="full", status="waiting", detail="halted at step 40; pods wait until 01:30"))
        return self

    def fork(self) -> Story:
        self.full(41, fork_at=41)
        self.add(ev.ForkDetected(epoch=41, parties=[1, 2], detail="p1r0s0t0 and p2r0s0t0 recorded different leaves"))
        return self

    def failed(self) -> Story:
        self.full(40)
        coord = self.coords[1]
        self.add(ev.WorkerProcess(pod=self.pod(coord), coord=coord, state="exited", signal="SIGKILL"), 0.4)
        for other in (self.coords[0], self.coords[2]):
            fields = {"party": 1, "since_s": 9.8}
            self.add(ev.EngineEvent(pod=self.pod(other), level="error", event="peer_lost", fields=fields), 4.9)
            self.add(ev.WorkerProcess(pod=self.pod(other), coord=other, state="exited", rc=4))
        what = "p1r0s0t0 was ended by SIGKILL, party 0 lost party 1 for 9.8 s; resumable until 01:30"
        self.add(ev.StageChanged(name="full", status="failed", detail=what))
        return self

    def gave_up(self) -> Story:
        self.failed()
        self.add(ev.StageChanged(name="teardown", status="running"))
        for coord in self.coords:
            self.add(self.pod_event(coord, "gone"), 0.2)
        self.add(ev.StageChanged(name="teardown", status="ok", detail="every pod is proven gone"))
        self.add(ev.RunEnded(status="failed", detail="p1r0s0t0 was ended by SIGKILL"))
        return self

    def finished(self, ok: bool = True) -> Story:
        self.full(self.steps)
        for coord in self.coords:
            values = {"accuracy": 0.9611, "loss": 0.1204}
            pod, said = self.pod(coord), digest("result")
            self.add(ev.ResultReported(pod=pod, coord=coord, phase="full", result_hash=said, values=values), 0.05)
            self.add(ev.WorkerProcess(pod=self.pod(coord), coord=coord, state="exited", rc=0))
        self.add(ev.StageChanged(name="full", status="ok"), 0.1)
        self.add(ev.StageChanged(name="verify-full", status="running"))
        detail = "" if ok else "root of epoch 31, party 2: signature does not verify"
        self.add(
            self.verdict("full", {"accuracy": 0.9611, "loss": 0.1204}, detail),
            1.1,
        )
        self.add(ev.StageChanged(name="verify-full", status="ok" if ok else "failed"))
        if ok:
            self.stage("collect", 0.6)
            self.add(ev.StageChanged(name="teardown", status="running"))
            for coord in self.coords:
                self.add(self.pod_event(coord, "gone"), 0.2)
            self.add(ev.StageChanged(name="teardown", status="ok"))
            self.add(ev.RunEnded(status="ok"))
        return self

    def verdict(self, phase: str, values: dict[str, float], detail: str = "") -> ev.PhaseVerdict:
        """The verifier's word; with ``detail`` it is a no."""
        ids = {"global_root": digest("g", phase), "sid_job": digest("sid", phase), "bundle": phase}
        if detail:
            return ev.PhaseVerdict(phase=phase, ok=False, detail=detail, **ids)
        result = digest("result") if phase == "full" else digest("result", phase)
        files = {"proof_bundle.json": hashlib.sha256(phase.encode()).hexdigest()}
        said = {"values": values, "result_hashes": [result], "level": "transcripts", "pinned": True, "files": files}
        return ev.PhaseVerdict(phase=phase, ok=True, **said, **ids)  # type: ignore[arg-type]

    def write(self, folder: Path) -> Path:
        """The run's folder with its journal, and what stands for the proof bundles of its verdicts."""
        for phase in ("smoke", "full"):
            home = folder / "artifacts" / phase
            if any(isinstance(e, ev.PhaseVerdict) and e.phase == phase for e in self.events):
                home.mkdir(parents=True, exist_ok=True)
                (home / "proof_bundle.json").write_bytes(phase.encode())
        folder.mkdir(parents=True, exist_ok=True)
        journal = Journal(folder / "journal.sqlite", source="test")
        journal.append(*self.events)
        journal.close()
        return folder
