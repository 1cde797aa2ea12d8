"""Whole private runs over bad networks: the same roots and results, and a slow pair of parties is named."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from private_kit import Fleet, LoneZygote, Zygote, direct_links, until

from uvcc_engine.bench.launch.plane_links import RelayProcess
from uvcc_engine.contract.job.private_job import PrivateJob

JOB = PrivateJob(steps=4, batch=16, checkpoint_every=5, test_rows=20)
EVERY_FAULT = {
    "seed": 11,
    "drop": 0.02,
    "duplicate": 0.03,
    "reorder": 0.03,
    "corrupt": 0.01,
    "delay": 0.03,
    "delay_s": 0.02,
    "partition_every_s": 1.0,
    "partition_s": 0.2,
}


def evidence(fleet: Fleet) -> list[Any]:
    """What each party signed: the root of every epoch and the result."""
    return [(fleet.roots(p), fleet.result(p)["result_hash"]) for p in range(3)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_roots_and_result_are_the_same_with_every_fault_and_a_relay_that_is_killed(
    zygote: Zygote, tmp_path: Path
) -> None:
    calm = Fleet(tmp_path / "calm", zygote, JOB, direct_links())
    calm.launch()
    assert calm.wait() == [0, 0, 0]
    address = direct_links()[0]["listen"]
    (tmp_path / "relay").mkdir()
    relay = RelayProcess(tmp_path / "relay", listen=address)
    try:
        links = [link | {"rto_s": 0.2, "faults": EVERY_FAULT} for link in relay.links("relay")]
        rough = Fleet(tmp_path / "rough", zygote, JOB, links)
        rough.launch()
        for epoch in (0, 2):
            until(lambda epoch=epoch: epoch in rough.roots(1), 400, f"epoch {epoch}")
            relay.process.send_signal(signal.SIGKILL)
            relay.process.wait()
            relay.start()
        assert rough.wait() == [0, 0, 0]
    finally:
        relay.stop()
    assert evidence(rough) == evidence(calm)
    told = [e for p in range(3) for e in rough.events(p, "protocol_error")]
    assert told  # damaged frames were seen, attributed and dropped
    assert all(e["dropped"] for e in told)


# -- two network namespaces --------------------------------------------------------------------------------------------

NEAR, FAR = "10.213.77.1", "10.213.77.2"
PORTS = (7700, 7701, 7702)
RATE = ("rate", "100mbit", "burst", "64kb", "latency", "50ms")


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True)


class Namespaces:
    """Two network namespaces joined by a pair of interfaces that carry 100 Mbit/s each way."""

    def __init__(self) -> None:
        self.names = [f"uvcc{os.getpid()}{end}" for end in "ab"]
        ends = [f"u{os.getpid()}{end}" for end in "ab"]
        for name in self.names:
            ip("netns", "add", name)
        ip("link", "add", ends[0], "netns", self.names[0], "type", "veth", "peer", ends[1], "netns", self.names[1])
        for name, end, address in zip(self.names, ends, (NEAR, FAR), strict=True):
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            subprocess.run(
                ["tc", "-n", name, "qdisc", "add", "dev", end, "root", "tbf", *RATE], check=True, capture_output=True
            )

    def inside(self, which: int) -> list[str]:
        """What goes in front of a command that shall run in a namespace."""
        return ["ip", "netns", "exec", self.names[which]]

    def close(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.fixture
def spaces() -> Iterator[Namespaces]:
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("needs root and iproute2")
    made = None
    try:
        made = Namespaces()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this kernel refuses: {error.stderr.decode(errors='replace').strip()}")
    yield made
    made.close()


class Apart:
    """Zygotes of two namespaces as if they were one: party 2 is in the far one."""

    def __init__(self, folder: Path, spaces: Namespaces) -> None:
        self._zygotes = []
        for n in range(2):
            (folder / str(n)).mkdir()
            self._zygotes.append(LoneZygote(folder / str(n), spaces.inside(n)))
        self._of: dict[int, Zygote] = {}

    def ask(self, request: dict[str, Any]) -> Any:
        if "wait" in request:
            return self._of[request["wait"]].ask(request)
        chosen = self._zygotes[request["spec"]["coord"].startswith("p2")]
        answer = chosen.ask(request)
        self._of[answer["pid"]] = chosen
        return answer

    def close(self) -> None:
        for zygote in self._zygotes:
            zygote.close()


@pytest.mark.slow
def test_training_completes_over_a_slow_network_and_the_waits_name_the_slow_pair(
    tmp_path: Path, spaces: Namespaces
) -> None:
    """Parties 0 and 1 are near, 2 is far behind 100 Mbit/s, and what 0 and 2 say to each other takes 40 ms more."""
    command = [*spaces.inside(1), sys.executable, str(Path(__file__).with_name("delay_proxy.py"))]
    proxy = subprocess.Popen(
        [*command, f"{NEAR}:{PORTS[0]}", "0.04"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert proxy.stdin is not None
    assert proxy.stdout is not None
    through = f"127.0.0.1:{int(proxy.stdout.readline())}"
    near = {"0": f"{NEAR}:{PORTS[0]}", "1": f"{NEAR}:{PORTS[1]}"}
    links = [{"kind": "direct", "listen": near[str(p)], "peers": near, "report_s": 0.025} for p in (0, 1)]
    links.append({"kind": "direct", "listen": "", "peers": near | {"0": through}, "report_s": 0.025})
    apart = Apart(tmp_path, spaces)
    try:
        fleet = Fleet(tmp_path / "fleet", apart, JOB, links)  # type: ignore[arg-type]
        fleet.launch()
        assert fleet.wait() == [0, 0, 0]
    finally:
        apart.close()
        proxy.stdin.close()
        proxy.wait(120)
    assert all(fleet.exit(p)["status"] == "done" for p in range(3))
    waits = Counter((p, e["peer"]) for p in range(3) for e in fleet.events(p, "waiting"))
    pairs = Counter({(a, b): waits[a, b] + waits[b, a] for a, b in ((0, 1), (0, 2), (1, 2))})
    assert pairs.most_common(1)[0][0] == (0, 2)
    assert waits.most_common(1)[0][0] in {(0, 2), (2, 0)}
