"""Three parties, a data owner and a signed policy in a folder; their workers as real processes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from warm_kit import WarmChild

import uvcc_engine
from uvcc_engine.bench.launch.fleet import CODE
from uvcc_engine.contract.job.model_hash import model_hash
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.spec import WorkerSpec
from uvcc_engine.contract.job.topology import Topology
from uvcc_engine.contract.machine.free_ports import ports
from uvcc_engine.contract.run_files.control import HaltRequest, write_halt
from uvcc_engine.data.sets import load_digits
from uvcc_engine.sealing.inputs import PartyInputs, SharedInputs, open_inputs, share_dataset
from uvcc_engine.sealing.purpose import Purpose
from uvcc_engine.transcript.signing.identity import Identity
from uvcc_engine.transcript.terms.policy import Policy, PolicyParty, sign_policy, write_signatures
from uvcc_engine.worker.admission import SEALED

PARTIES = [Identity(bytes([i + 1]) * 32, bytes([i + 9]) * 32) for i in range(3)]
OWNER = Identity(b"o" * 32, b"w" * 32)


def shared_digits(job: PrivateJob) -> SharedInputs:
    data = load_digits(job.seed, job.test_rows, job.val_rows)
    purpose = Purpose.of(job, [OWNER.public.x25519])
    return share_dataset(data, job.frac_bits, tuple(p.public for p in PARTIES), OWNER, seed=1, purpose=purpose, job=job)


def opened_digits(job: PrivateJob) -> list[PartyInputs]:
    made = shared_digits(job)
    return [open_inputs(made.boxes[i], party=i, identity=PARTIES[i], **made.public()) for i in range(3)]


SOON_LOST = {"first_contact_s": 150.0, "peer_timeout_s": 60.0, "refused_s": 1.0}
"""For links of workers of which one is killed: its host refuses connections, or it is silent. No living worker does the
one, nor on a busy machine the other."""


def free_port() -> int:
    return ports(1)[0]


def until(found: Callable[[], Any], seconds: float, what: str) -> Any:
    """Poll until ``found`` gives something true."""
    pause = select.poll()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = found()
        if value:
            return value
        pause.poll(10)
    raise AssertionError(f"{what} did not happen within {seconds} s")


class Zygote:
    """The process that workers are forked from: itself forked from the session's, which has imported everything."""

    def __init__(self) -> None:
        self._process = WarmChild("zygote")

    def ask(self, request: dict[str, Any]) -> Any:
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.end(60)


class LoneZygote(Zygote):
    """One that runs elsewhere: it imports everything itself."""

    def __init__(self, folder: Path, prefix: Sequence[str]) -> None:
        """``prefix`` goes in front of its command."""
        site = folder / "site"
        site.mkdir()
        (site / "CODE_HASH").write_text(CODE)
        (site / "uvcc_engine").symlink_to(Path(uvcc_engine.__file__).parent)
        self._own = subprocess.Popen(
            [*prefix, sys.executable, str(Path(__file__).with_name("private_zygote.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"},
        )

    def ask(self, request: dict[str, Any]) -> Any:
        assert self._own.stdin is not None
        assert self._own.stdout is not None
        self._own.stdin.write(json.dumps(request) + "\n")
        self._own.stdin.flush()
        return json.loads(self._own.stdout.readline())

    def close(self) -> None:
        assert self._own.stdin is not None
        self._own.stdin.close()
        self._own.wait(120)


class Fleet:
    """One job of three parties; ``launch`` starts their workers, ``wait`` returns their exit codes."""

    def __init__(
        self,
        folder: Path,
        zygote: Zygote,
        job: PrivateJob,
        links: list[dict[str, Any]],
        made: SharedInputs | None = None,
        **limits: Any,
    ):
        self.folder, self.job, self.links, self._zygote = folder, job, links, zygote
        self.run = "test.full"
        made = made or shared_digits(job)
        self.policy = Policy.build(
            job=job.to_json(),
            model_hash=model_hash(job.to_json()),
            code_hash=CODE,
            topology=Topology(),
            parties=[PolicyParty(i, p.public, "local", "here") for i, p in enumerate(PARTIES)],
            owner=made.owner,
            commitments=made.commitments,
            reveal=[(v, "owner") if v in SEALED else (v, "clients") if v == "answers" else v for v in job.reveal],
            limits=limits,
            nonce=hashlib.sha256(b"nonce").hexdigest(),
        )
        for i, party in enumerate(PARTIES):
            home = self.home(i)
            home.mkdir(parents=True)
            party.store(home / "identity")
            (home / "inputs").write_bytes(made.boxes[i])
            (home / "policy.json").write_bytes(self.policy.canonical)
            write_signatures(
                home / "signatures.json", {p: sign_policy(i_, self.policy, CODE) for p, i_ in enumerate(PARTIES)}
            )
        self.pids: list[int] = []

    def home(self, party: int) -> Path:
        return self.folder / f"pod{party}"

    def dir(self, party: int) -> Path:
        return self.home(party) / "run"

    def spec(self, party: int, **changes: Any) -> WorkerSpec:
        home = self.home(party)
        values: dict[str, Any] = {
            "run": self.run,
            "kind": "private",
            "coord": f"p{party}r0s0t0",
            "topology": {"replicas": 1, "stages": 1, "tensor": 1, "microbatches": 1},
            "job": self.job.to_json(),
            "dir": str(self.dir(party)),
            "identity_dir": str(home / "identity"),
            "policy": str(home / "policy.json"),
            "signatures": str(home / "signatures.json"),
            "inputs": str(home / "inputs"),
            "link": self.links[party],
        }
        return WorkerSpec.from_json(values | changes)

    def launch(self, *, only: tuple[int, ...] = (0, 1, 2), halt: str = "", lie: str = "", **changes: Any) -> list[int]:
        """Start workers; ``halt`` is a control file's mode that lies there already; see ``private_liars``."""
        self.pids = []
        for party in only:
            self.dir(party).mkdir(exist_ok=True)
            for stale in ("exit.json", ".HALT"):
                (self.dir(party) / stale).unlink(missing_ok=True)
            if halt and party == only[-1]:
                write_halt(self.dir(party), HaltRequest(halt, "early", self.run))
            log = str(self.home(party) / "worker.log")
            request = {"spec": self.spec(party, **changes).to_json(), "log": log, **({"lie": lie} if lie else {})}
            self.pids.append(self._zygote.ask(request)["pid"])
        return self.pids

    def wait(self) -> list[int]:
        return [self._zygote.ask({"wait": pid})["rc"] for pid in self.pids]

    def exit(self, party: int) -> dict[str, Any]:
        return json.loads((self.dir(party) / "exit.json").read_text())  # type: ignore[no-any-return]

    def result(self, party: int) -> dict[str, Any]:
        return json.loads((self.dir(party) / "result.json").read_text())  # type: ignore[no-any-return]

    def events(self, party: int, name: str) -> list[dict[str, Any]]:
        try:
            lines = (self.dir(party) / "events.jsonl").read_text().split("\n")[:-1]  # the last may not be whole yet
        except FileNotFoundError:
            return []
        return [e["fields"] for e in map(json.loads, lines) if e["event"] == name]

    def roots(self, party: int) -> dict[int, str]:
        return {e["epoch"]: e["root"] for e in self.events(party, "epoch_root")}

    def csv(self, party: int) -> list[str]:
        return (self.dir(party) / "training.csv").read_text().splitlines()


def direct_links() -> list[dict[str, Any]]:
    peers = {str(p): f"127.0.0.1:{port}" for p, port in enumerate(ports(3))}
    return [{"kind": "direct", "listen": peers[str(p)], "peers": peers} for p in range(3)]


def client_token(number: int) -> str:
    return hashlib.sha256(b"client %d" % number).hexdigest()


@contextlib.contextmanager
def relay_links(folder: Path, clients: int = 0) -> Iterator[list[dict[str, Any]]]:
    """A relay process; yields the parties' link settings. ``clients`` have ``client_token``s there."""
    group = "test.full"
    tokens = [hashlib.sha256(b"token %d" % p).hexdigest() for p in range(3)]
    credentials = [{"party": p, "group": group, "token": t} for p, t in enumerate(tokens)]
    credentials += [{"client": n, "group": group, "token": client_token(n)} for n in range(clients)]
    config = folder / "relay.json"
    config.write_text(json.dumps({"db": "relay.db", "ready_file": "ready.json", "credentials": credentials}))
    config.chmod(0o600)
    process = subprocess.Popen([sys.executable, "-m", "uvcc_engine.relay", "--config", str(config)])
    try:
        place = folder / "ready.json"
        ready = until(lambda: place.exists() and place.read_text(), 500, "the relay")
        url = json.loads(ready)["url"]
        links = []
        for p, token in enumerate(tokens):
            file = folder / f"token{p}"
            file.write_text(token)
            file.chmod(0o600)
            links.append({"kind": "relay", "relay_url": url, "token_file": str(file), "group": group})
        yield links
    finally:
        process.terminate()
        process.wait(120)
