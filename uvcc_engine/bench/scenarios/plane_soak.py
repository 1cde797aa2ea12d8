"""The soak of ``bench plane --faults``: many workers, every fault on, the relay and a party killed -9 again and again.

Three party processes with a third of the workers each exchange messages whose content follows from their tag, and
commit their progress with the plane's cursors. Every message is compared; at the end each worker's count must be exact
and the hash over everything delivered must be the one that a run without any fault has.
"""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Final

from uvcc_engine.bench.launch.plane_links import RelayProcess, direct_links
from uvcc_engine.bench.party.plane_party import identity
from uvcc_engine.contract.errors import PeerLostError, UvccError
from uvcc_engine.contract.job.link_spec import LinkSpec
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.machine.benchrows import Row, row
from uvcc_engine.plane.api import Tag
from uvcc_engine.plane.connect import open_plane
from uvcc_engine.plane.live import LivePlane

_FAULTS: Final = {
    "drop": 0.01,
    "duplicate": 0.02,
    "reorder": 0.02,
    "corrupt": 0.005,
    "delay": 0.02,
    "delay_s": 0.05,
    "partition_every_s": 7.0,
    "partition_s": 0.3,
}
_PER_ROUND: Final = 16
_COMMIT_ROUNDS: Final = 8
_PARTY_KILLS: Final = 3
_LIMIT_S: Final = 1800


def content(worker: int, src: int, dst: int, tag: Tag) -> bytes:
    """The message of a tag: 0 to 511 bytes."""
    seed = b"%d.%d.%d.%d.%d" % (worker, src, dst, tag.epoch, tag.op)
    size = hashlib.blake2b(seed, digest_size=2).digest()
    return hashlib.shake_128(seed).digest(int.from_bytes(size, "little") % 512)


def tags(round_: int) -> list[Tag]:
    return [Tag(round_, op % 2, op, 1) for op in range(_PER_ROUND)]


def absorb(chain: bytes, party: int, worker: int, round_: int, messages: list[bytes]) -> bytes:
    """The running hash over what a worker was given, in order."""
    digest = hashlib.sha256(chain + b"%d.%d.%d" % (party, worker, round_))
    for m in messages:
        digest.update(len(m).to_bytes(4, "little") + m)
    return digest.digest()


def others(party: int) -> list[int]:
    return [p for p in range(PARTIES) if p != party]


def expected(party: int, worker: int, rounds: int) -> str:
    """The hash of a run without faults: no network takes part in it."""
    chain = b""
    for r in range(rounds):
        messages = [content(worker, src, party, tag) for tag in tags(r) for src in others(party)]
        chain = absorb(chain, party, worker, r, messages)
    return chain.hex()


def work(config: dict[str, Any], party: int, worker: int) -> dict[str, Any]:
    """One worker from its last commit to the end."""
    link = config["links"][worker % 2][party]
    events: dict[str, int] = {}

    def on_event(name: str, fields: dict[str, Any]) -> None:
        events[name] = events.get(name, 0) + 1

    plane = open_plane(
        party=party,
        coord=f"p{party}r{worker}s0t0",
        sid_sub=hashlib.sha256(b"soak %d" % worker).digest(),
        identity=identity(party),
        peers={p: identity(p).public for p in range(PARTIES)},
        link=LinkSpec.from_json(
            link | {"durable": True, "rto_s": 0.5, "faults": _FAULTS | {"seed": config["seed"] * 1000 + worker}}
        ),
        recorder=None,
        state_dir=Path(config["state"]) / str(party),
        on_event=on_event,
    )
    start, chain = json.loads(plane.restored) if plane.restored else (0, "")
    digest = bytes.fromhex(chain)
    for r in range(start, config["rounds"]):
        for tag in tags(r):
            for dst in others(party):
                plane.send(dst, tag, content(worker, party, dst, tag))
        got = []
        for tag in tags(r):
            for src in others(party):
                message = bytes(plane.recv(src, tag))
                if message != content(worker, src, party, tag):
                    raise UvccError(f"worker {worker} of party {party}: {tag} of party {src} is not what was sent")
                got.append(message)
        digest = absorb(digest, party, worker, r, got)
        if (r + 1) % _COMMIT_ROUNDS == 0 or r + 1 == config["rounds"]:
            plane.commit(json.dumps([r + 1, digest.hex()]).encode())
    _part(plane, others(party), again=start == config["rounds"])
    counts = [s["messages"] for s in plane.stats().values()]
    plane.commit(json.dumps([config["rounds"], digest.hex()]).encode())
    plane.close()
    return {"worker": worker, "hash": digest.hex(), "messages": counts, "events": events}


def _part(plane: LivePlane, peers: list[int], *, again: bool) -> None:
    """Stay until the peers have everything. ``again``: killed after its last commit, so they may have left already."""
    for dst in peers:
        plane.send_control(dst, b"done")
    for src in peers:
        try:
            plane.recv_control(src, 5.0 if again else None)
        except (TimeoutError, PeerLostError):
            if not again:
                raise


def party_process(config: dict[str, Any], party: int) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(config["workers"]) as pool:
        return list(pool.map(lambda w: work(config, party, w), range(config["workers"])))


class _Party:
    """A party's process, killed and started again until it ends by itself."""

    def __init__(self, path: Path, party: int) -> None:
        self._command = [sys.executable, "-m", "uvcc_engine.bench.scenarios.plane_soak", str(path), str(party)]
        self._lock = threading.Lock()
        self.restarts = 0
        self._start()

    def _start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)

    def kill(self) -> None:
        with self._lock:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()  # its output is read, and dropped, by result()
                self.restarts += 1
                self._start()

    def result(self) -> list[dict[str, Any]]:
        while True:
            process = self.process
            text = process.communicate()[0]
            with self._lock:
                if process is not self.process:
                    continue
                if process.returncode:
                    raise UvccError(f"a party of the soak failed with code {process.returncode}")
                return list(json.loads(text))


def soak(workers: int, messages: int, kills: int, seed: int) -> list[Row]:
    """Run it. Raises UvccError if anything was lost, repeated, altered or reordered."""
    per_party = max(1, workers // PARTIES)
    rounds = -(-messages // (per_party * PARTIES * (PARTIES - 1) * _PER_ROUND))
    rng, done, killed = random.Random(seed), threading.Event(), 0
    port = direct_links()[0]["listen"]
    with tempfile.TemporaryDirectory(prefix="uvcc-soak-") as name:
        folder = Path(name)
        running = RelayProcess(folder, listen=port, stream_listen=direct_links()[0]["listen"])
        links = [running.links("relay"), running.links("stream")]
        config = {"links": links, "workers": per_party, "rounds": rounds, "seed": seed, "state": str(folder / "state")}
        path = folder / "soak.json"
        path.write_text(json.dumps(config))
        begun = time.perf_counter()
        parties = [_Party(path, p) for p in range(PARTIES)]
        try:
            with ThreadPoolExecutor(PARTIES + 1) as pool:
                results = [pool.submit(p.result) for p in parties]
                pool.submit(_when_any_ends, results, done)
                plan = ["relay"] * kills + ["party"] * min(kills, _PARTY_KILLS)
                rng.shuffle(plan)
                for victim in plan:
                    if done.wait(rng.uniform(1.0, 3.0)):
                        break
                    killed += 1
                    if victim == "relay":
                        running.process.kill()
                        running.process.wait()
                        running.start()
                    else:
                        parties[1].kill()
                found = [r.result(_LIMIT_S) for r in results]
        finally:
            for party in parties:
                party.process.kill()
            running.stop()
        taken = time.perf_counter() - begun
    return _judge(found, rounds, per_party, taken, killed, parties[1].restarts)


def _when_any_ends(results: list[Future[list[dict[str, Any]]]], done: threading.Event) -> None:
    wait(results, return_when=FIRST_COMPLETED)
    done.set()


def _judge(
    found: list[list[dict[str, Any]]], rounds: int, per_party: int, taken: float, killed: int, restarts: int
) -> list[Row]:
    due = rounds * _PER_ROUND
    lost = twice = 0
    for party, results in enumerate(found):
        for r in results:
            if r["hash"] != expected(party, r["worker"], rounds):
                raise UvccError(f"worker {r['worker']} of party {party} ended with another hash than without faults")
            lost += sum(max(0, due - n) for n in r["messages"])
            twice += sum(max(0, n - due) for n in r["messages"])
    if lost or twice:
        raise UvccError(f"{lost} messages lost, {twice} delivered twice")
    total = due * per_party * PARTIES * (PARTIES - 1)
    events: dict[str, int] = {}
    for r in (r for results in found for r in results):
        for name, n in r["events"].items():
            events[name] = events.get(name, 0) + n
    told = {"messages": total, "killed": killed, "party_restarts": restarts, "seconds": round(taken, 1)} | events
    print(json.dumps(told), file=sys.stderr)
    return [
        row("soak", "rate", "msg/s", [total / taken]),
        row("soak_lost", "share", "of messages", [lost / total]),
        row("soak_twice", "share", "of messages", [twice / total]),
    ]


if __name__ == "__main__":
    print(json.dumps(party_process(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]))))
