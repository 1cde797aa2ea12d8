"""Two owners hold different columns of the same people, three domains train on both, standardised under sharing.

Everything is real: six homes, pods, workers and the relay. What is opened at the end is of all common rows, by
statistics that nobody had in clear.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "haltd"))
sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))
sys.path.insert(0, str(Path(__file__).parent))
from demorun import Uvcc, user_at
from relaykit import TOKENS, relay_of
from test_federated_run import Domains, everything

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
OWNER_TOKENS = [f"token-of-owner-{n}-0123456789" for n in range(2)]
COLUMNS, COMMON = (40, 24), 90
JOB = (
    *("--set", "job.steps=3", "--set", "job.batch=16", "--set", "smoke.steps=0", "--set", "link=direct"),
    *("--set", "job.reveal=[loss, weights, statistics]", "--set", "job.test_rows=1", "--set", "job.standardise=true"),
    *("--set", "job.join={key: person, columns: [40, 24], label: 1}", "--set", "job.model=logistic-digits"),
)


def key_of(row: int) -> str:
    return f"somebody-{row:03d}-{row * 7919 % 9973:04d}"


def table() -> np.ndarray:
    x: np.ndarray = np.random.default_rng(3).normal(size=(COMMON, 64)) * np.linspace(0.5, 20, 64) + np.arange(64)
    return x.round(3)


def write_tables(owners: list[Uvcc]) -> None:
    x = table()
    parts = (x[:, : COLUMNS[0]], x[:, COLUMNS[0] :])
    for n, user in enumerate(owners):
        names = [f"c{n}_{i}" for i in range(COLUMNS[n])]
        own = [*range(COMMON), *range(200 + 100 * n, 207 + 100 * n)]
        lines = [",".join(["person", *names, *(["digit"] if n else [])])]
        for row in np.random.default_rng(n).permutation(own).tolist():
            values = parts[n][row % COMMON].tolist()
            lines.append(",".join(map(str, [key_of(row), *values, *([row % 10] if n else [])])))
        (user.home / "rows.csv").write_text("\n".join(lines) + "\n")
        columns = {"person": "drop"} | {name: {"kind": "standardise", "statistics": {}} for name in names}
        schema: dict[str, Any] = {"columns": columns}
        schema |= {"target": {"column": "digit", "values": list(range(10))}} if n else {}
        (user.home / "rows.schema.yaml").write_text(json.dumps(schema))


def test_columns_of_two_owners_are_trained_on_between_three_domains(tmp_path: Path) -> None:
    people: list[dict[str, Any]] = [{"party": p, "group": "g", "token": t} for p, t in enumerate(TOKENS)]
    people += [{"owner": n, "group": "g", "token": t} for n, t in enumerate(OWNER_TOKENS)]
    with ExitStack() as stack:
        url = stack.enter_context(relay_of(tmp_path, people))
        homes = [tmp_path / name for name in ("p0", "p1", "p2", "o0", "o1")]
        for home in homes:
            home.mkdir()
        users = [stack.enter_context(user_at(home)) for home in homes]
        domains, owners = Domains(users[:3], url, job=JOB, to_owner=("weights", "statistics")), users[3:]
        for n, user in enumerate(owners):
            (user.home / "token").write_text(OWNER_TOKENS[n])
            assert user.run("owner", "init").returncode == 0
        named = [part for o in owners for part in ("--owner", str(o.home / "config" / "owner" / "owner.pub"))]
        domains.prepare(*named)
        write_tables(owners)
        meets = [("--relay", url, "--token-file", str(o.home / "token")) for o in owners]
        for n, user in enumerate(owners):
            assert user.run("owner", "pin", *map(str, domains.keys)).returncode == 0
            done = user.run("owner", "requests", *meets[n])
            assert "owner 0" not in done.stderr
            assert "joins        rows of which all owners have the key 'person'" in done.stdout
        running = [domains.start(n) for n in range(3)]
        sharing = [
            user.start(
                *("owner", "share", domains.proposal, "--yes", "--wait", "240", *meets[n]),
                *("--data", str(user.home / "rows.csv"), "--schema", str(user.home / "rows.schema.yaml")),
            )
            for n, user in enumerate(owners)
        ]
        for process in sharing:
            out, err = process.communicate(timeout=300)
            assert process.returncode == 0, (out, err[-3000:])
            assert f"{COMMON} of your {COMMON + 7} rows are with all 2 owners" in err
            assert "can find all of yours" in out
        for n, process in enumerate(running):
            out, err = process.communicate(timeout=300)
            assert process.returncode == 0, (n, err[-3000:])
            assert json.loads(out)["verified"]
        keys = [key_of(row).encode() for row in range(COMMON)]
        for place in (*homes[:3], *(tmp_path.glob("relay*"))):
            for path, data in everything(place) if place.is_dir() else [(place, place.read_bytes())]:
                assert not any(key in data for key in keys), path
        out_ = tmp_path / "results"
        done = owners[0].run("owner", "results", domains.proposal[:12], "--out", str(out_), *meets[0])
        assert done.returncode == 0, done.stdout + done.stderr
        check_statistics(out_ / "statistics.npz")
        with np.load(out_ / "weights.npz") as found:
            assert found["weight.0"].shape == (65, 10)
        done = owners[1].run("owner", "results", domains.proposal[:12], *meets[1])
        assert "are sealed to the first owner" in done.stdout, done.stderr
        pinned = [part for key in domains.keys for part in ("--domain", str(key))]
        done = users[0].run("verify", str(domains.run_of(1) / "artifacts"), *pinned)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "owners       2 shared for this attempt" in done.stdout


def check_statistics(path: Path) -> None:
    """They are those of all common rows but one, which is the one that is tested, column by column."""
    x = table()
    with np.load(path) as found:
        mean, deviation = found["mean"], found["deviation"]
    near = [r for r in range(COMMON) if np.abs(np.delete(x, r, 0).mean(0) - mean).max() < 2e-3]
    assert len(near) == 1
    clear = np.delete(x, near[0], 0).std(0)
    assert np.abs(deviation / clear - 1.0).max() < 5e-3
