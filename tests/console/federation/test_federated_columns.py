"""Two owners hold different columns of the same people; three domains train on both, halt in the middle, and go on.

Everything is real: five homes, pods, workers and the relay. What is opened at the end is of all common rows, by ends
of columns that nobody had in clear, and is what the same training in clear gives.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "haltd"))
sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))
sys.path.insert(0, str(Path(__file__).parent))
from demorun import PATIENT, Uvcc, user_at
from relaykit import TOKENS, relay_of
from test_federated_run import Domains, begun, everything
from test_resume_between_domains import at, until

from uvcc_engine.contract.job.owner_files import STATISTIC_TENSORS, STATISTIC_WORDS
from uvcc_engine.contract.job.private_job import PrivateJob, StandardiseBy
from uvcc_engine.data.sets import Dataset
from uvcc_engine.model.definition.specs import find_model
from uvcc_engine.model.learning.plaintext import forward, train_plaintext
from uvcc_engine.model.learning.standardising import ClearStatistics

torch.set_num_threads(1)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
OWNER_TOKENS = [f"token-of-owner-{n}-0123456789" for n in range(2)]
COLUMNS, COMMON, ALONE = (40, 24), 130, 7
LEARNS = {
    "steps": 60,
    "batch": COMMON - 1,  # all rows a step: their order, which follows from tags, has no say
    "test_rows": 1,
    "lr": 0.5,
    "standardise": True,
    "model": "logistic-digits",
    "reveal": ["loss", "weights", "statistics"],
}
JOINS = "job.join={key: person, columns: [40, 24], label: 1}"
JOB = (*(f"job.{k}={json.dumps(v)}" for k, v in LEARNS.items()), JOINS, "smoke.steps=0", "link=direct", *PATIENT)
KINDS = ("range", "quantiles", "deviation")


def key_of(row: int) -> str:
    return f"somebody-{row:03d}-{row * 7919 % 9973:04d}"


def table() -> np.ndarray:
    """The features of all common people, as nobody has them."""
    x: np.ndarray = np.random.default_rng(3).normal(size=(COMMON, 64)) * np.linspace(0.5, 20, 64) + np.arange(64)
    return x.round(3)


def digits() -> np.ndarray:
    return np.arange(COMMON) % 10


def names(owner: int) -> list[str]:
    return [f"c{owner}_{i}" for i in range(COLUMNS[owner])]


def schema(*owners: int) -> str:
    columns: dict[str, Any] = {"person": "drop"}
    columns |= {name: {"kind": "standardise", "statistics": {}} for n in owners for name in names(n)}
    target = {"target": {"column": "digit", "values": list(range(10))}} if 1 in owners else {}
    return json.dumps({"columns": columns, **target})


def write_tables(owners: list[Uvcc]) -> None:
    x = table()
    parts = (x[:, : COLUMNS[0]], x[:, COLUMNS[0] :])
    for n, user in enumerate(owners):
        own = [*range(COMMON), *range(200 + 100 * n, 200 + 100 * n + ALONE)]
        lines = [",".join(["person", *names(n), *(["digit"] if n else [])])]
        for row in np.random.default_rng(n).permutation(own).tolist():
            values = parts[n][row % COMMON].tolist()
            lines.append(",".join(map(str, [key_of(row), *values, *([row % 10] if n else [])])))
        (user.home / "rows.csv").write_text("\n".join(lines) + "\n")
        (user.home / "rows.schema.yaml").write_text(schema(n))


class Joining:
    """The two owners of a proposal that joins their columns, as users of their own."""

    def __init__(self, domains: Domains, owners: list[Uvcc]) -> None:
        self.domains, self.owners = domains, owners

    def meets(self, n: int) -> list[str]:
        return ["--relay", self.domains.url, "--token-file", str(self.owners[n].home / "token")]

    def prepare(self) -> None:
        for n, user in enumerate(self.owners):
            (user.home / "token").write_text(OWNER_TOKENS[n])
            assert user.run("owner", "init").returncode == 0
        files = [str(o.home / "config" / "owner" / "owner.pub") for o in self.owners]
        self.domains.prepare(*(part for file in files for part in ("--owner", file)))
        write_tables(self.owners)
        for n, user in enumerate(self.owners):
            assert user.run("owner", "pin", *map(str, self.domains.keys)).returncode == 0
            done = user.run("owner", "requests", *self.meets(n))
            assert "joins        rows of which all owners have the key 'person'" in done.stdout, done.stderr

    def share(self) -> None:
        """Both at once: each waits for the rosters, and for the other's tags."""
        files = [
            ("--data", str(o.home / "rows.csv"), "--schema", str(o.home / "rows.schema.yaml")) for o in self.owners
        ]
        options = ("--yes", "--wait", "240")
        sharing = [
            user.start("owner", "share", self.domains.proposal, *options, *files[n], *self.meets(n))
            for n, user in enumerate(self.owners)
        ]
        for process in sharing:
            out, err = process.communicate(timeout=300)
            assert process.returncode == 0, (out, err[-3000:])
            assert f"{COMMON} of your {COMMON + ALONE} rows are with all 2 owners" in err
            assert "can find all of yours" in out

    def results(self, n: int, *args: str) -> subprocess.CompletedProcess[str]:
        return self.owners[n].run("owner", "results", self.domains.proposal[:12], *args, *self.meets(n))


def halt_and_go_on(domains: Domains, running: list[subprocess.Popen[str]]) -> int:
    """P1's domain halts all, P2's signs to go on; the step at which all three stood."""
    runs = [domains.run_of(n).name for n in range(3)]
    until(domains, 1, lambda s: s.phase == "full" and s.step >= 2, running[1])
    done = domains.users[1].run("halt", runs[1], "--now")
    assert done.returncode == 0, done.stderr
    steps = {until(domains, n, at("full", "waiting"), running[n]).halt.step for n in range(3)}
    assert len(steps) == 1
    done = domains.users[2].run("resume", runs[2])
    assert done.returncode == 0, done.stderr
    return steps.pop()


@pytest.mark.parametrize("by", KINDS)
def test_columns_of_two_owners_are_trained_on_between_three_domains_that_halt_and_go_on(
    tmp_path: Path, by: StandardiseBy
) -> None:
    people: list[dict[str, Any]] = [{"party": p, "group": "g", "token": t} for p, t in enumerate(TOKENS)]
    people += [{"owner": n, "group": "g", "token": t} for n, t in enumerate(OWNER_TOKENS)]
    with ExitStack() as stack:
        url = stack.enter_context(relay_of(tmp_path, people))
        homes = [tmp_path / name for name in ("p0", "p1", "p2", "o0", "o1")]
        for home in homes:
            home.mkdir()
        users = [stack.enter_context(user_at(home)) for home in homes]
        job = tuple(part for key in (*JOB, f"job.standardise_by={by}") for part in ("--set", key))
        domains = Domains(users[:3], url, job=job, to_owner=("weights", "statistics"))
        joining = Joining(domains, users[3:])
        joining.prepare()
        running = [domains.start(n) for n in range(3)]
        for process in running:
            begun(process)
        joining.share()
        assert 0 < halt_and_go_on(domains, running) < LEARNS["steps"]
        for n, process in enumerate(running):
            out, err = process.communicate(timeout=300)
            assert process.returncode == 0, (n, err[-3000:])
            assert json.loads(out)["verified"]
            assert domains.seen(n).resumes == 1
        nobody_else_holds(homes[:3], tmp_path)
        done = joining.results(0, "--out", str(tmp_path / "results"))
        assert done.returncode == 0, done.stdout + done.stderr
        what_was_opened_is_what_the_same_training_gives_in_clear(tmp_path / "results", users[3], by)
        done = joining.results(1)
        assert "are sealed to the first owner" in done.stdout, done.stderr
        pinned = [part for key in domains.keys for part in ("--domain", str(key))]
        done = users[0].run("verify", str(domains.run_of(1) / "artifacts"), *pinned)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "owners       2 shared for this attempt" in done.stdout
        assert "consented    resume-1 by P2" in done.stdout


def nobody_else_holds(homes: list[Path], relay: Path) -> None:
    """No domain and no byte at the relay has a key of a person, or a row: in clear, as it was typed, or encoded."""
    x = table()
    secrets = [key_of(row).encode() for row in range(COMMON)]
    for part in (x[:3, : COLUMNS[0]], x[:3, COLUMNS[0] :]):
        secrets += [",".join(map(str, row)).encode() for row in part.tolist()]
        secrets += [np.rint(row * 65536).astype("<i8").tobytes() for row in part]
        secrets += [row.astype("<f8").tobytes() for row in part]
    held = [found for home in homes for found in everything(home)]
    for place in relay.glob("relay*"):
        held += everything(place) if place.is_dir() else [(place, place.read_bytes())]
    assert len(held) > 100
    for path, data in held:
        assert not any(secret in data for secret in secrets), path


def what_was_opened_is_what_the_same_training_gives_in_clear(results: Path, owner: Uvcc, by: StandardiseBy) -> None:
    """Which row is tested follows from the tags: of all that it could be, one fits, and fits closely."""
    x, y = table(), digits()
    job = PrivateJob.from_json({**LEARNS, "standardise_by": by})
    with np.load(results / "weights.npz") as found:
        weights = found["weight.0"]
    with np.load(results / "statistics.npz") as found:
        shift, size = (found[word] for word in STATISTIC_WORDS[STATISTIC_TENSORS[by][0]])

    def off(row: int) -> tuple[float, int]:
        rest = np.delete(np.arange(COMMON), row)
        clear = train_plaintext(job, Dataset(x[rest], y[rest], x[[row]], y[[row]], 10))
        return float(np.abs(clear.weights[0] - weights).max()), row

    best, second = sorted(off(row) for row in range(COMMON))[:2]
    assert best[0] < 0.02 < 0.1 < second[0], (best, second)
    rest = np.delete(np.arange(COMMON), best[1])
    clear = ClearStatistics.of(np.rint(x[rest] * 65536) / 65536, by)
    if by == "deviation":
        assert np.abs(shift - clear.mean).max() < 2e-3
    else:
        assert np.array_equal(shift, clear.mean)  # by bisection: exact, and the same after the resume as before it
    assert np.abs(size * clear.inverse - 1.0).max() < 5e-3
    scaled = (x - shift) / size
    scaled = np.clip(scaled, 0.0, 1.0) if by == "quantiles" else scaled
    model, tensors = find_model(job.model), [torch.from_numpy(weights)]
    predictions_are_of(results, owner, forward(model, tensors, torch.from_numpy(scaled)).numpy())


def predictions_are_of(results: Path, owner: Uvcc, outputs: Any) -> None:
    """Its own schema has its own columns: it is told so. With one of all columns it predicts as it was trained."""
    rows = [",".join(map(str, [key_of(n), *row])) for n, row in enumerate(table().tolist())]
    header = ",".join(["person", *names(0), *names(1)])
    (owner.home / "all.csv").write_text("\n".join([header, *rows]) + "\n")
    options = ("owner", "predict", "--model", str(results), "--data", str(owner.home / "all.csv"))
    done = owner.run(*options)
    assert done.returncode == 2
    assert "the schema gives 40 features and no outputs, the model takes 64 and 10" in done.stderr
    assert "the columns of all in the proposal's order" in done.stderr
    (owner.home / "all.yaml").write_text(schema(0, 1))
    done = owner.run(*options, "--schema", str(owner.home / "all.yaml"))
    assert done.returncode == 0, done.stderr
    said = [line.split(",") for line in done.stdout.strip().splitlines()[1:]]
    chances = np.exp(outputs) / np.exp(outputs).sum(1, keepdims=True)
    assert np.abs(np.array([line[2:] for line in said], float) - chances).max() < 1e-5
    assert [int(line[1]) for line in said] == chances.argmax(1).tolist()
