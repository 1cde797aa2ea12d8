"""Ranks before the run: forked as the agent forks them, they meet, add up, talk to the other parties, and report."""

from __future__ import annotations

import json
import os
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from uvcc_engine.agent import fabric
from uvcc_engine.agent.processes.child import ENTRIES
from uvcc_engine.contract.job.link_spec import LinkSpec
from uvcc_engine.contract.job.spec import WorkerSpec
from uvcc_engine.contract.job.topology import PARTIES, Coord, Topology
from uvcc_engine.contract.machine.free_ports import ports
from uvcc_engine.transcript.signing.identity import Identity

SIZE = Topology(2)


def specs(folder: Path, **job: Any) -> dict[Coord, tuple[WorkerSpec, dict[str, str]]]:
    """One spec per worker and its environment: two replicas of three parties, links direct."""
    coords = list(SIZE.coords())
    links = dict(zip(coords, ports(len(coords)), strict=True))
    masters = ports(PARTIES)
    who = {c: Identity.create(folder / f"identity-{c}") for c in coords}
    found = {}
    for c in coords:
        peers = [Coord(c.replica, p, 0, 0) for p in range(PARTIES)]
        spec = WorkerSpec(
            run="r.preflight",
            kind="preflight",
            coord=str(c),
            topology=Topology(replicas=2),
            job={
                "timeout_s": 120.0,
                "reduce_mib": 0.25,
                "pair_mib": 0.25,
                "peers": {str(p.party): who[p].public.to_json() for p in peers},
                "pods": [who[Coord(r, c.party, 0, 0)].public.to_json() for r in range(SIZE.replicas)],
                **job,
            },
            dir=str(folder / f"pod-{c.party}-{c.replica}"),
            identity_dir=str(folder / f"identity-{c}"),
            link=LinkSpec(
                kind="direct",
                listen=f"127.0.0.1:{links[c]}",
                peers={str(p.party): f"127.0.0.1:{links[p]}" for p in peers if p != c},
            ),
        )
        env = {"RANK": str(c.replica), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        found[c] = (spec, env | {"MASTER_PORT": str(masters[c.party])})
        Path(spec.dir).mkdir()
    return found


def run(work: dict[Coord, tuple[WorkerSpec, dict[str, str]]]) -> dict[str, dict[str, Any]]:
    """Every worker in a process of its own; their reports by coordinate."""
    pids = []
    for spec, env in work.values():
        if (pid := os.fork()) == 0:
            status = 70
            try:
                os.environ.update(env)
                status = fabric.main(spec)
            except BaseException:  # noqa: BLE001 - the parent sees the status
                traceback.print_exc()
            finally:
                os._exit(status)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * len(pids)
    return {str(c): json.loads((Path(s.dir) / fabric.report_name(s.coord)).read_text()) for c, (s, _) in work.items()}


def test_the_agent_knows_these_ranks() -> None:
    assert ENTRIES["preflight"] == fabric.__name__


@pytest.mark.parametrize("backend", ["unix", "sealed"])
def test_ranks_add_up_inside_a_party_and_talk_between_parties(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UVCC_GROUP_BACKEND", backend)
    found = run(specs(tmp_path))
    assert len(found) == 6
    for coord, report in found.items():
        party = Coord.parse(coord).party
        assert report["trouble"] == []
        assert report["backend"] == backend
        assert set(report["groups"]) == {"dp"}
        assert report["groups"]["dp"]["size"] == 2
        assert report["groups"]["dp"]["mib_s"] > 0
        assert set(report["pairs"]) == {str(p) for p in range(PARTIES) if p != party}
        assert all(v > 0 for pair in report["pairs"].values() for v in pair.values())
    a, b = found["p0r1s0t0"]["pairs"]["2"], found["p2r1s0t0"]["pairs"]["0"]
    assert (a["rtt_ms"], a["out_mib_s"], a["in_mib_s"]) == (b["rtt_ms"], b["in_mib_s"], b["out_mib_s"])


def test_a_rank_that_never_comes_is_reported_by_those_who_waited(tmp_path: Path) -> None:
    work = specs(tmp_path, timeout_s=2.0)
    absent = next(c for c in work if (c.party, c.replica) == (1, 0))  # it would serve its party's store
    del work[absent]
    found = run(work)
    alone = {t["part"]: t for t in found["p1r1s0t0"]["trouble"]}
    assert "cannot meet its sister ranks" in alone["groups"]["what"] or "waited" in alone["groups"]["what"]
    assert found["p1r1s0t0"]["groups"] == {}
    for coord in ("p0r0s0t0", "p2r0s0t0"):
        waiting = {t["part"]: t for t in found[coord]["trouble"]}
        assert "party 1" in waiting["pair 1"]["what"]
        assert waiting["pair 1"]["hint"]


def test_a_relay_that_is_away_is_named_before_the_console_gives_up(tmp_path: Path) -> None:
    """The ranks waited for it for a quarter of an hour, the console for two minutes: it knew of silent ranks alone."""
    began = time.monotonic()
    (tmp_path / "token").write_text("a-token")
    link = LinkSpec(
        kind="relay", relay_url=f"http://127.0.0.1:{ports(1)[0]}", token_file=str(tmp_path / "token"), group="g"
    )
    work = specs(tmp_path, timeout_s=1.0, pods=[])
    alone = {c: (replace(spec, link=link), env | {"WORLD_SIZE": "1", "RANK": "0"}) for c, (spec, env) in work.items()}
    found = run({c: one for c, one in alone.items() if c.replica == 0})
    for report in found.values():
        told = [t for t in report["trouble"] if t["part"].startswith("pair")]
        assert len(told) == 2
        assert all(f"the relay {link.relay_url} has not been reached" in t["what"] for t in told)
    assert time.monotonic() - began < 300


def test_pods_beyond_this_machine_that_nobody_named_do_not_meet(tmp_path: Path) -> None:
    spec, env = specs(tmp_path, pods=[], peers={})[Coord(0, 0, 0, 0)]
    (report,) = run({Coord(0, 0, 0, 0): (spec, env | {"MASTER_ADDR": "10.77.0.9"})}).values()
    (trouble,) = report["trouble"]
    assert "beyond this machine, and has no keys to seal it" in trouble["what"]
    assert "policy that names the party's pods" in trouble["hint"]


def test_a_sum_that_is_wrong_is_no_bandwidth() -> None:
    class Broken:
        name, size, index = "dp", 2, 0

        def sum_(self, block: Any) -> Any:
            return block.add_(1)  # one element's worth short

    with pytest.raises(fabric.VerificationError, match="does not add up"):
        fabric.measure_reduction(Broken(), fabric.device_of("cpu"), 0.01)  # type: ignore[arg-type]
