"""A pod that was replaced and comes back to life, with its keys, its links and a stale transcript: it takes no part."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_migration_fleet import commit, moved

from uvcc_engine.bench.launch.fleet import RUN, Fleet, Forker, until, whole_lines
from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.contract.job.spec import WorkerSpec
from uvcc_engine.contract.job.topology import Coord, Topology
from uvcc_engine.contract.machine.free_ports import ports
from uvcc_engine.contract.run_files import files
from uvcc_engine.contract.run_files.control import HOLD
from uvcc_engine.transcript.leaves import leaf_file
from uvcc_engine.transcript.terms.migration_plan import migration_after

SIZE = Topology()
JOB = PrivateJob(steps=16, batch=16, checkpoint_every=4, test_rows=40)
AT = 8
PATIENCE_S = 500.0
OLD = Coord(0, 1, 0, 0)
P0, P2 = Coord(0, 0, 0, 0), Coord(0, 2, 0, 0)


@contextlib.contextmanager
def relay(folder: Path, tokens: list[str]) -> Iterator[dict[Coord, dict[str, Any]]]:
    """A relay process for these three tokens; how each worker reaches it."""
    folder.mkdir()
    group = "fleet.full-2"
    credentials = [{"party": p, "group": group, "token": t} for p, t in enumerate(tokens)]
    config = folder / "relay.json"
    config.write_text(json.dumps({"db": "relay.db", "ready_file": "ready.json", "credentials": credentials}))
    config.chmod(0o600)
    process = subprocess.Popen([sys.executable, "-m", "uvcc_engine.relay", "--config", str(config)], cwd=folder)
    try:
        ready = folder / "ready.json"
        url = json.loads(until(lambda: ready.exists() and ready.read_text(), PATIENCE_S, "the relay"))["url"]
        links = {}
        for c in SIZE.coords():
            file = folder / f"token{c.party}"
            file.write_text(tokens[c.party])
            file.chmod(0o600)
            links[c] = {"kind": "relay", "relay_url": url, "token_file": str(file), "group": group}
        yield links
    finally:
        process.terminate()
        process.wait(120)


def direct() -> dict[Coord, dict[str, Any]]:
    at = dict(zip(SIZE.coords(), ports(3), strict=True))
    return {
        c: {
            "kind": "direct",
            "listen": f"127.0.0.1:{at[c]}",
            "peers": {str(o.party): f"127.0.0.1:{at[o]}" for o in at if o != c},
        }
        for c in at
    }


def tokens(of: str) -> list[str]:
    return [hashlib.sha256(f"{of} {p}".encode()).hexdigest() for p in range(3)]


@pytest.fixture(scope="module")
def calm(forker: Forker, whole: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """The run as it goes on without the replaced pod while that stays dead."""
    fleet = resumed(forker, whole, tmp_path_factory.mktemp("calm") / "fleet")
    fleet.launch()
    assert set(fleet.wait().values()) == {0}, fleet.logs()
    return fleet


def resumed(forker: Forker, whole: Fleet, folder: Path) -> Fleet:
    """The fleet in which another pod has taken P1's place, with its shares, before it is launched."""
    fleet = Fleet(
        folder, forker, JOB, SIZE, keys=moved, goes_on=lambda p: migration_after(whole.policy, commit(whole, AT), p)
    )
    assert set(whole.hand_over(fleet, AT, [(0, 0), (2, 0)]).values()) == {0}, whole.logs()
    return fleet


def come_back(forker: Forker, old: Fleet, home: Path, link: dict[str, Any]) -> int:
    """Start the replaced pod's worker once more, as its agent would: its policy, keys, folder and transcript.

    It resumes from the checkpoint that the others went on from; its leaves reach far beyond.
    """
    shutil.copytree(old.home(OLD.party), home)
    for gone in (*(home / "run").glob(files.EXITS), *(home / "run" / "checkpoints").glob("step-1[26]")):
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    values: dict[str, Any] = {
        "run": RUN,
        "kind": "private",
        "coord": str(OLD),
        "topology": {"replicas": 1, "stages": 1, "tensor": 1, "microbatches": 1},
        "job": old.job.to_json(),
        "dir": str(home / "run"),
        "identity_dir": str(home / "identity"),
        "policy": str(home / leaf_file.POLICY),
        "signatures": str(home / leaf_file.SIGNATURES),
        "inputs": str(home / "inputs"),
        "link": link,
        "lead": True,
        "resume": True,
        "env": {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports(1)[0])},
    }
    spec = WorkerSpec.from_json(values).to_json()
    return int(forker.ask({"spec": spec, "log": str(home / "came_back.log")})["pid"])


def held(fleet: Fleet) -> None:
    """Until the run is held in the middle of its resumed steps, by the hold that lay there when it began."""
    until(lambda: all(beat(fleet, c).get("phase") == "hold" for c in SIZE.coords()), PATIENCE_S, "the hold")
    assert 0 < fleet.steps(OLD) < JOB.steps - AT


def beat(fleet: Fleet, c: Coord) -> dict[str, Any]:
    lines = whole_lines(fleet.dir(c) / files.heartbeat_name(0))
    return dict(json.loads(lines[-1])) if lines else {}


def turned_away(fleet: Fleet) -> bool:
    """Both survivors have told of somebody who is not the peer that they expect."""
    return all(fleet.events(c, "connections_rejected") for c in (P0, P2))


OVER_A_RELAY = ("relay", "relay, with the credential of now")


@pytest.mark.parametrize("kind", ["direct", *(pytest.param(k, marks=pytest.mark.ci(__file__)) for k in OVER_A_RELAY)])
def test_a_replaced_pod_that_comes_back_takes_no_part(
    forker: Forker, whole: Fleet, calm: Fleet, tmp_path: Path, kind: str
) -> None:
    fleet, home = resumed(forker, whole, tmp_path / "fleet"), tmp_path / "old"
    with contextlib.ExitStack() as stack:
        now = tokens("full-2")
        links = direct() if kind == "direct" else stack.enter_context(relay(tmp_path / "relay", now))
        fleet.launch(link=links.__getitem__, halt=(HOLD, P0))
        held(fleet)
        its = dict(links[OLD])
        if kind == "direct":
            its["listen"] = ""  # its address has who came in its place; so it dials both of the others
        elif kind == "relay":
            file = tmp_path / "its.token"
            file.write_text(tokens("full")[OLD.party])
            file.chmod(0o600)
            its["token_file"] = str(file)
        leaves = sorted(p.name for p in (whole.dir(OLD) / f"transcript_{OLD}").iterdir())
        pid = come_back(forker, whole, home, its)
        log = home / "came_back.log"
        if kind == "direct":
            until(lambda: turned_away(fleet), PATIENCE_S, "a refusal of both survivors")
        elif kind == "relay":
            until(lambda: (home / "run" / files.exit_name(0, lead=True)).exists(), PATIENCE_S, "its end")
        else:
            until(lambda: log.exists() and "waiting" in log.read_text(), PATIENCE_S, "its waiting")
        fleet.halt("release", P0)
        assert set(fleet.wait().values()) == {0}, fleet.logs()
        ended = forker.ask({"wait": [pid], "seconds": 0.0})[str(pid)]
    assert ended not in (0, None)
    said = log.read_text()
    assert "policy_accepted" in said, said  # it did come to life
    if kind == "relay":
        assert "refuses this party" in said
    assert "epoch_root" not in said
    assert "run_done" not in said
    assert sorted(p.name for p in (home / "run" / f"transcript_{OLD}").iterdir()) == leaves
    # the others' run is, to the bit, what it is while that pod stays dead
    assert fleet.hashes() == calm.hashes()
    for c in SIZE.coords():
        assert fleet.events(c, "epoch_root") == calm.events(c, "epoch_root")
        assert not [e for name in ("protocol_error", "peer_lost") for e in fleet.events(c, name)]
    fleet.verified(tmp_path / "bundle")
