"""A whole fleet of real workers on this machine, for benchmarks and rehearsals.

Every pod has its own keys, every party's ranks one world; workers are forked from one process that imported torch
once and talk over direct links. The keys are public: never use this for data that matters.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import uvcc_engine
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.job.migration import Migration
from uvcc_engine.contract.job.model_hash import model_hash
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.spec import WorkerSpec
from uvcc_engine.contract.job.topology import Coord, Topology
from uvcc_engine.contract.machine.free_ports import ports
from uvcc_engine.contract.run_files import files
from uvcc_engine.contract.run_files.control import HaltRequest, write_halt
from uvcc_engine.contract.run_files.waiting import Waiting
from uvcc_engine.data.sets import Dataset
from uvcc_engine.owner.client import dataset_for
from uvcc_engine.sealing.inputs import share_dataset
from uvcc_engine.sealing.purpose import Purpose
from uvcc_engine.transcript.leaves import leaf_file
from uvcc_engine.transcript.proof.bundle import assemble_folder
from uvcc_engine.transcript.proof.verification_certificate import Certificate
from uvcc_engine.transcript.proof.verifier import verify
from uvcc_engine.transcript.signing.identity import Identity
from uvcc_engine.transcript.terms import commit_record
from uvcc_engine.transcript.terms.policy import Policy, PolicyParty, sign_policy, write_signatures

CODE = hashlib.sha256(b"the wheel of the fleet").hexdigest()
OWNER = Identity(b"O" * 32, b"W" * 32)
RUN = "fleet.full"


def pod_identity(party: int, replica: int) -> Identity:
    seed = hashlib.sha256(f"pod {party} {replica}".encode()).digest()
    return Identity(seed, hashlib.sha256(seed).digest())


def whole_lines(path: Path) -> list[str]:
    """The lines of a file that is being written; a last one that is not whole yet is left out."""
    try:
        return path.read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []


def until(found: Callable[[], Any], seconds: float, what: str) -> Any:
    """Poll until ``found`` gives something true."""
    pause, end = select.poll(), time.monotonic() + seconds
    while time.monotonic() < end:
        if value := found():
            return value
        pause.poll(10)
    raise UvccError(f"{what} did not happen within {seconds} s")


def _parent(pid: int) -> int:
    """The parent of a process, 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


class Forker:
    """The process that workers are forked from, as on a pod."""

    def __init__(self, folder: Path, env: Mapping[str, str] | None = None, *, within: Sequence[str] = ()) -> None:
        """``env`` is added to what this process has, and reaches every worker. ``within``: a command that runs it."""
        site = folder / "site"
        site.mkdir(parents=True)
        (site / "CODE_HASH").write_text(CODE)
        (site / "uvcc_engine").symlink_to(Path(uvcc_engine.__file__).parent)
        self._forked: list[int] = []
        self._process = subprocess.Popen(
            [*within, sys.executable, "-m", "uvcc_engine.bench.launch.fleet_forker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,  # so that the code is that of the site, not of the folder this was called from
            env={**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", **(env or {})},
        )

    def ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if "pid" in answer:
            self._forked.append(int(answer["pid"]))
        return answer

    def children_s(self) -> float:
        """Processor seconds of all workers that have ended and were waited for."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End the forker, and whatever it still waits for."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            for pid in self._forked:
                if _parent(pid) == self._process.pid:
                    os.kill(pid, signal.SIGKILL)
            self._process.kill()
            self._process.wait()


class Fleet:
    """One job on 3 x R pods; ``launch`` starts all workers, ``wait`` returns their exit codes by coordinate."""

    def __init__(
        self,
        folder: Path,
        forker: Forker,
        job: PrivateJob,
        size: Topology,
        *,
        keys: Callable[[int, int], Identity] = pod_identity,
        goes_on: Callable[[list[PolicyParty]], Migration] | None = None,
        elsewhere: Mapping[int, Forker] | None = None,
        meets: str = "127.0.0.1",
        env: Mapping[str, str] | None = None,
        data: Dataset | None = None,
    ) -> None:
        """``keys``: the identity of a party's pod of a replica; ``goes_on``: where the job starts, by the parties.

        ``elsewhere``: who starts the workers of a replica, if not ``forker``; ``meets``: the address of the first
        replica's machine, where the parties' ranks meet; ``env``: added to that of the workers; ``data``: what it
        trains on, else the packaged rows that fit its model.
        """
        self.folder, self.job, self.size, self._forker = folder, job, size, forker
        self._elsewhere, self._meets, self.env = dict(elsewhere or {}), meets, dict(env or {})
        self.coords = list(size.coords())
        pods = [[keys(p, r) for p in range(3)] for r in range(size.replicas)]
        public = [tuple(i.public for i in row) for row in pods]
        purpose = Purpose.of(job, [OWNER.public.x25519])
        rows = dataset_for(job) if data is None else data
        made = share_dataset(
            rows, job.frac_bits, public[0], OWNER, seed=1, replicas=public[1:], purpose=purpose, job=job
        )
        parties = [
            PolicyParty(p, pods[0][p].public, "local", "here", tuple(row[p].public for row in pods[1:]))
            for p in range(3)
        ]
        if goes_on is not None:
            job = self.job = dataclasses.replace(job, start=goes_on(parties))
        self.policy = Policy.build(
            job=job.to_json(),
            model_hash=model_hash(job.to_json()),
            code_hash=CODE,
            topology=size,
            parties=parties,
            owner=made.owner,
            commitments=made.commitments,
            reveal=[(v, "owner") if v == "weights" else v for v in job.reveal],
            limits={},
            nonce=hashlib.sha256(b"fleet nonce").hexdigest(),
        )
        signatures = {p: sign_policy(pods[0][p], self.policy, CODE) for p in range(3)}
        for r, boxes in enumerate((made.boxes, *made.replicas)):
            for p in range(3):
                home = self.home(p, r)
                home.mkdir(parents=True)
                pods[r][p].store(home / "identity")
                (home / "inputs").write_bytes(boxes[p])
                (home / leaf_file.POLICY).write_bytes(self.policy.canonical)
                write_signatures(home / leaf_file.SIGNATURES, signatures)
        self.pids: dict[Coord, int] = {}

    def home(self, party: int, replica: int = 0) -> Path:
        return self.folder / f"p{party}r{replica}"

    def dir(self, c: Coord) -> Path:
        return self.home(c.party, c.replica) / "run"

    def lead(self, c: Coord) -> bool:
        return c.stage == 0 and c.tensor == 0

    def launch(
        self,
        link: Callable[[Coord], dict[str, Any]] | None = None,
        halt: tuple[str, Coord] | None = None,
        **changes: Any,
    ) -> None:
        """Start every worker; ``changes`` to their specs. ``link``: what a worker uses in place of direct links.

        ``halt``: as :meth:`halt`, asked for before the first one starts, so that it is met however fast they are.
        """
        found = ports(len(self.coords) + 3)
        masters, listen = found[:3], dict(zip(self.coords, found[3:], strict=True))
        for c in self.coords:  # all of them before the first worker starts, which may end before the last one does
            self.dir(c).mkdir(exist_ok=True)
            for stale in self.dir(c).glob(files.EXITS):
                stale.unlink()
            (self.dir(c) / files.HALT).unlink(missing_ok=True)
        if halt is not None:
            self.halt(*halt)
        for c in self.coords:
            home, t = self.home(c.party, c.replica), self.size
            others = [p for p in range(3) if p != c.party]
            peers = {str(p): f"127.0.0.1:{listen[Coord(c.replica, p, c.stage, c.tensor)]}" for p in others}
            world = {"RANK": str(t.local_rank(c)), "WORLD_SIZE": str(t.workers_per_party)}
            values: dict[str, Any] = {
                "run": RUN,
                "kind": "private",
                "coord": str(c),
                "topology": {k: getattr(t, k) for k in ("replicas", "stages", "tensor", "microbatches")},
                "job": self.job.to_json(),
                "dir": str(self.dir(c)),
                "identity_dir": str(home / "identity"),
                "policy": str(home / leaf_file.POLICY),
                "signatures": str(home / leaf_file.SIGNATURES),
                "inputs": str(home / "inputs"),
                "link": link(c) if link else {"kind": "direct", "listen": f"127.0.0.1:{listen[c]}", "peers": peers},
                "lead": self.lead(c),
                "env": {**self.env, **world, "MASTER_ADDR": self._meets, "MASTER_PORT": str(masters[c.party])},
            }
            self.pids[c] = self._start(WorkerSpec.from_json(values | changes))

    def _start(self, spec: WorkerSpec) -> int:
        c = Coord.parse(spec.coord)
        log = self.home(c.party, c.replica) / f"worker_{c}.log"
        return int(self._at(c).ask({"spec": spec.to_json(), "log": str(log)})["pid"])

    def _at(self, c: Coord) -> Forker:
        return self._elsewhere.get(c.replica, self._forker)

    def hand_over(self, to: Fleet, step: int, pods: Sequence[tuple[int, int]]) -> dict[Coord, int]:
        """Have some (party, replica) pods of this fleet hand a checkpoint over to another's; returns exit codes.

        The boxes go to the pods of ``to`` that they are for, as the console would carry them.
        """
        started = {}
        for party, replica in pods:
            c, home, news = Coord(replica, party, 0, 0), self.home(party, replica), to.home(0)
            values: dict[str, Any] = {
                "run": f"{RUN}.handover",
                "kind": "handover",
                "coord": str(c),
                "topology": {k: getattr(self.size, k) for k in ("replicas", "stages", "tensor", "microbatches")},
                "dir": str(home / "handover"),
                "identity_dir": str(home / "identity"),
                "policy": str(news / leaf_file.POLICY),
                "signatures": str(news / leaf_file.SIGNATURES),
                "job": {"from": str(self.dir(c)), "policy": str(home / leaf_file.POLICY), "step": step},
            }
            started[c] = self._start(WorkerSpec.from_json(values))
        found = self._forker.ask({"wait": list(started.values()), "seconds": 60.0})
        made = [self.home(c.party, c.replica) / "handover" / "start" for c in started]
        for target in (c for c in to.coords if to.lead(c)):
            start = to.dir(target) / "start"
            start.mkdir(parents=True, exist_ok=True)
            for folder in made:
                for name in (leaf_file.POLICY, commit_record.RECORD, f"c?_p{target.party}r{target.replica}_by_*.box"):
                    for file in folder.glob(name):
                        shutil.copy(file, start)
        return {c: int(found[str(pid)]) for c, pid in started.items()}

    def wait(self, seconds: float = 120.0) -> dict[Coord, int]:
        """Exit codes by worker; what still runs after ``seconds`` is killed."""
        found: dict[str, int] = {}
        for forker in (self._forker, *self._elsewhere.values()):
            mine = [pid for c, pid in self.pids.items() if self._at(c) is forker]
            found |= forker.ask({"wait": mine, "seconds": seconds})
        return {c: int(found[str(pid)]) for c, pid in self.pids.items()}

    def end(self) -> None:
        """Kill what still runs of the last launch."""
        self.wait(0.0)

    def halt(self, mode: str, c: Coord, nonce: str = "n1") -> None:
        """Ask for a halt on one pod only: the others must follow by themselves."""
        write_halt(self.dir(c), HaltRequest(mode, nonce, RUN))

    def exit(self, c: Coord) -> dict[str, Any]:
        name = files.exit_name(self.size.local_rank(c), lead=self.lead(c))
        return json.loads((self.dir(c) / name).read_text())  # type: ignore[no-any-return]

    def result(self, c: Coord) -> dict[str, Any]:
        name = files.result_name(self.size.local_rank(c), lead=self.lead(c))
        return json.loads((self.dir(c) / name).read_text())  # type: ignore[no-any-return]

    def events(self, c: Coord, name: str) -> list[dict[str, Any]]:
        lines = whole_lines(self.dir(c) / files.EVENTS)
        return [e["fields"] for e in map(json.loads, lines) if e["event"] == name and e["coord"] == str(c)]

    def steps(self, c: Coord) -> int:
        """Epochs whose root this worker has signed."""
        return len(self.events(c, "epoch_root"))

    def waiting_on(self, c: Coord) -> Waiting | None:
        """Whom the worker's last heartbeat says that it waits for."""
        lines = whole_lines(self.dir(c) / files.heartbeat_name(self.size.local_rank(c)))
        return Waiting.of(json.loads(lines[-1])) if lines else None

    def hashes(self) -> set[str]:
        return {self.result(c)["result_hash"] for c in self.coords}

    def verified(self, out: Path) -> Certificate:
        """Assemble the evidence of all pods and verify it, transcripts included."""
        out.mkdir()
        for c in self.coords:
            shutil.copytree(self.dir(c) / f"transcript_{c}", out / str(c.replica) / f"transcript_{c}")
        for name in (leaf_file.POLICY, leaf_file.SIGNATURES):
            shutil.copy(self.home(0) / name, out / name)
        return verify(assemble_folder(out))

    def logs(self) -> str:
        return "".join(f"{p.name}: {p.read_text()}" for p in sorted(self.folder.glob("p*/worker_*.log")))
