"""Figures reach the services that a training names, and none of them can hurt it."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from lm_kit import small

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.run_files.writer import RunWriter
from uvcc_engine.train import worker
from uvcc_engine.train.sinks import mlflow_sink, sink_feed, sink_registry
from uvcc_engine.train.sinks.__main__ import serve
from uvcc_engine.train.sinks.sink_feed import PATIENCE_S, TRAINING, Sinks, sinks_of

Told = list[tuple[str, str, int]]


def sinks(folder: Path, code: str, told: Told) -> Sinks:
    opening = sink_registry.SinkOpening("r", "p", folder, {"train.lr": 0.1})
    command: Sequence[str] = [sys.executable, "-S", "-c", code]
    return Sinks(["x"], opening, lambda *said: told.append(said), commands={"x": command})


def test_a_sink_is_told_the_run_its_figures_and_its_end(tmp_path: Path) -> None:
    told: Told = []
    feed = sinks(tmp_path, f"import sys; open({str(tmp_path / 'got')!r}, 'w').write(sys.stdin.read())", told)
    feed.log(1, {"train/loss": 2.5})
    feed.log(2, {"train/loss": 2.0})
    feed.status = "done"
    feed.close()
    lines = [json.loads(x) for x in (tmp_path / "got").read_text().splitlines()]
    assert lines == [
        {
            **{"run": "r", "project": "p", "folder": str(tmp_path), "config": {"train.lr": 0.1}},
            **{"training": "", "goes_on": False},
        },
        {"step": 1, "values": {"train/loss": 2.5}},
        {"step": 2, "values": {"train/loss": 2.0}},
        {"status": "done"},
    ]
    assert told == []


def test_a_sink_that_ends_is_named_once_with_its_last_word(tmp_path: Path) -> None:
    told: Told = []
    feed = sinks(tmp_path, "import sys; sys.exit('no such\\x1b[31m project')", told)
    end = time.monotonic() + 120
    while not told and time.monotonic() < end:
        feed.log(1, {"train/loss": 2.5})
    feed.log(2, {"train/loss": 2.5})
    feed.close()
    assert [(name, error) for name, error, _ in told] == [("x", "no such project")]


def test_a_sink_that_hangs_costs_rows_and_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: Told = []
    monkeypatch.setitem(PATIENCE_S, "failed", 0.1)
    feed = sinks(tmp_path, "import time; time.sleep(100)", told)
    began = time.monotonic()
    for step in range(5000):
        feed.log(step, {"train/loss": 2.5, "train/lr": 1e-3})
    feed.close()
    assert time.monotonic() - began < 90  # the sink itself would go on for longer
    ((name, error, dropped),) = told
    assert (name, error) == ("x", "it did not end in time and was killed")
    assert 1000 < dropped < 5000


def test_a_slow_sink_hears_the_end_behind_what_it_has_not_read_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: Told = []
    monkeypatch.setitem(PATIENCE_S, "halted", 200.0)
    opened, got = tmp_path / "opened", tmp_path / "got"
    wait = f"import os, sys, time\nwhile not os.path.exists({str(opened)!r}): time.sleep(0.01)\ntime.sleep(0.3)\n"
    feed = sinks(tmp_path, f"{wait}open({str(got)!r}, 'w').write(sys.stdin.read())", told)
    rows = [{"train/loss": 2.5, "train/lr": 1e-3}] * 2000 + [{"v" * n: 1.0} for n in range(60, 0, -1)] + [{}]
    for row in rows:  # until the pipe has hardly a byte left
        feed.log(1, row)
    feed.status = "halted"
    opened.touch()
    feed.close()
    lines = [json.loads(x) for x in got.read_text().splitlines()]
    assert lines[-1] == {"status": "halted"}
    ((_, error, dropped),) = told
    assert (error, len(lines)) == ("", len(rows) + 2 - dropped)


def test_a_sink_that_reads_no_more_and_stays_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: Told = []
    monkeypatch.setitem(PATIENCE_S, "failed", 0.5)
    closed = tmp_path / "closed"
    stays = f"sys.stdin.readline()\nos.close(0)\nopen({str(closed)!r}, 'w')\ntime.sleep(100)"
    feed = sinks(tmp_path, f"import os, sys, time\n{stays}", told)
    end = time.monotonic() + 120
    while not closed.exists() and time.monotonic() < end:
        time.sleep(0.01)
    feed.close()
    assert [error for _, error, _ in told] == ["it did not end in time and was killed"]


def test_a_killed_sink_s_last_words_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PATIENCE_S, "failed", 3.0)
    told: Told = []
    code = "import sys, time; print('no route to the server', file=sys.stderr, flush=True); time.sleep(600)"
    feed = sinks(tmp_path, code, told)
    end = time.monotonic() + 120
    while "route" not in (tmp_path / "sink_x.log").read_text() and time.monotonic() < end:
        time.sleep(0.05)
    feed.close()
    assert told == [("x", "it did not end in time and was killed: no route to the server", 0)]


def test_steps_that_are_repeated_are_told_once_unless_they_came_out_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training that was killed at step 4 goes on from step 2: step 3 comes out as before, step 4 does not."""
    told: list[tuple[int, float]] = []

    class Kept:
        def log(self, step: int, values: Mapping[str, float]) -> None:
            if values["train/loss"] == 9.0:
                raise OSError("the service says no")
            told.append((step, values["train/loss"]))

        def close(self, status: str) -> None: ...

    monkeypatch.setattr(sink_registry, "opener", lambda name: lambda opening: Kept())
    about = {"run": "r", "project": "p", "folder": str(tmp_path), "config": {}, "training": "r-1", "goes_on": True}

    def lines(*rows: tuple[int, float]) -> io.StringIO:
        each = [{"step": step, "values": {"train/loss": loss, "train/toks_per_s": time.time()}} for step, loss in rows]
        return io.StringIO("\n".join(map(json.dumps, [about, *each])))

    serve("x", lines((1, 2.5), (2, 2.4), (3, 2.3), (4, 2.2)))
    with (tmp_path / "sink_x.steps").open("a") as torn:
        torn.write("train/loss 5 2.")
    serve("x", lines((3, 2.3), (4, 1.2), (5, 2.0)))
    serve("x", lines((4, 1.2)))
    with pytest.raises(OSError, match="says no"):
        serve("x", lines((6, 9.0)))
    serve("x", lines((6, 1.9)))
    assert told == [(1, 2.5), (2, 2.4), (3, 2.3), (4, 2.2), (4, 1.2), (5, 2.0), (6, 1.9)]


def test_a_pod_that_replaces_another_tells_mlflow_no_step_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at step 4, and its note of what it had told was lost with it; another pod goes on from step 2."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "server").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")

    def serve_on(pod: str, goes_on: bool, *rows: tuple[int, float]) -> None:
        (tmp_path / pod).mkdir()
        about = {"run": "r", "project": "p", "folder": str(tmp_path / pod), "config": {}, "training": "r.full"}
        each = [{"step": step, "values": {"train/loss": loss, "train/lr": 0.1}} for step, loss in rows]
        ended = {"status": "done"}
        serve("mlflow", io.StringIO("\n".join(map(json.dumps, [{**about, "goes_on": goes_on}, *each, ended]))))

    serve_on("pod", False, (1, 2.5), (2, 2.4), (3, 1 / 3), (4, 2.2))
    serve_on("replaced", True, (3, 1 / 3), (4, 1.2), (5, 2.0))
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("p").experiment_id])
    points = [(p.step, p.value) for p in client.get_metric_history(run.info.run_id, "train/loss")]
    assert sorted(points) == [(1, 2.5), (2, 2.4), (3, 1 / 3), (4, 1.2), (4, 2.2), (5, 2.0)]


def test_a_training_by_hand_has_a_name_that_no_other_folder_of_its_name_has(tmp_path: Path) -> None:
    """So a service does not take it for a continuation of another one; a rollout's run id stands for no other run."""
    names = []
    for folder in ("a", "b", "a"):
        with RunWriter.open(tmp_path / folder / "manual", "manual") as writer:
            opened = []

            def sinks(
                names: list[str], opening: sink_registry.SinkOpening, *_: object, to: list[str] = opened
            ) -> Sinks:
                to.append(opening.training)
                return Sinks([], opening, lambda *said: None)

            for by_hand in (True, False):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(sink_feed, "Sinks", sinks)
                    with sinks_of(small(sinks="mlflow"), writer, by_hand=by_hand, goes_on=False):
                        pass
            assert opened[1] == "manual"
            names.append(opened[0])
    assert names[0] == names[2] != names[1]
    assert all(name.startswith("manual-") for name in names)


class Tracked:
    """An MLflow server with the runs that were made at it."""

    def __init__(self) -> None:
        self.made: list[dict[str, str]] = []
        self.described = 0

    def get_experiment_by_name(self, name: str) -> object:
        return SimpleNamespace(experiment_id="7")

    def search_runs(self, experiments: list[str], wanted: str, max_results: int) -> list[object]:
        return [
            _run(at) for at, tags in enumerate(self.made) if wanted in [f"tags.`{k}` = '{v}'" for k, v in tags.items()]
        ]

    def create_run(self, experiment: str, run_name: str, tags: dict[str, str]) -> object:
        self.made.append(tags)
        return _run(len(self.made) - 1)

    def log_batch(self, run_id: str, params: Sequence[object]) -> None:
        self.described += 1

    def update_run(self, run_id: str, status: str) -> None: ...


def _run(at: int) -> object:
    return SimpleNamespace(info=SimpleNamespace(run_id=f"id{at}"))


def test_a_training_goes_on_in_its_run_on_a_machine_that_has_no_note_of_it(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    server = Tracked()

    def run_of(folder: str, training: str, goes_on: bool) -> str:
        (tmp_path / folder).mkdir(exist_ok=True)
        opening = sink_registry.SinkOpening("m", "p", tmp_path / folder, {}, training, goes_on)
        return mlflow_sink.run_of(server, opening)

    assert run_of("pod", "m.full", goes_on=False) == "id0"
    assert run_of("pod", "m.full", goes_on=True) == "id0"
    assert run_of("replaced", "m.full", goes_on=True) == "id0"
    assert run_of("other", "other.full", goes_on=True) == "id1"
    assert run_of("anew", "m.full", goes_on=False) == "id2"
    assert server.described == 3


class Away:
    """An MLflow client whose server is away for some calls, or says no."""

    def __init__(self, *errors: Exception | None) -> None:
        self.errors, self.logged = list(errors), []  # type: ignore[var-annotated]

    def log_batch(self, run_id: str, metrics: Sequence[object]) -> None:
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise RuntimeError("API request failed") from error
        self.logged.append(len(metrics))

    def set_terminated(self, run_id: str, status: str) -> None:
        self.logged.append(status)


def test_mlflow_waits_for_a_server_that_is_away_and_takes_a_no(tmp_path: Path) -> None:
    requests, now = pytest.importorskip("requests"), [0.0]

    def sink(away: Away) -> mlflow_sink.MlflowSink:
        return mlflow_sink.MlflowSink(away, "r", sleep=lambda s: now.append(now[-1] + s), clock=lambda: now[-1])

    away = Away(*[requests.ConnectionError("refused")] * 30)
    sink(away).log(1, {"loss": 2.0})
    sink(away).close("done")
    assert (away.logged, now[-1]) == ([1, "FINISHED"], 30 * mlflow_sink.AGAIN_S)
    with pytest.raises(RuntimeError):
        sink(Away(ValueError("401"))).log(1, {"loss": 2.0})
    assert now[-1] == 30 * mlflow_sink.AGAIN_S
    with pytest.raises(RuntimeError):
        sink(Away(*[requests.ConnectionError("refused")] * 1000)).log(1, {"loss": 2.0})
    assert now[-1] <= 31 * mlflow_sink.AGAIN_S + mlflow_sink.PATIENCE_S


def test_what_is_unknown_or_not_installed_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"train.sinks names 'wanbd', which is unknown") as caught:
        sink_registry.check(["wanbd"])
    assert caught.value.hint == "did you mean wandb?"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in sink_registry.BUILT_IN:
        with pytest.raises(ConfigError, match=f"names {name}, and {name} is not installed") as caught:
            sink_registry.check([name])
        assert caught.value.hint == f"pip install 'uvcc[{name}]'"


PLUGGED = """
import importlib.util
import json
class Sink:
    def __init__(self, opening):
        self.opening, self.rows = opening, []
    def log(self, step, values):
        self.rows.append([step, sorted(values)])
    def close(self, status):
        told = [self.opening.run, self.opening.project, self.opening.config["train.steps"], self.rows, status]
        (self.opening.folder / "told.json").write_text(json.dumps(told))
"""


def test_another_packages_sink_is_found_and_fed_by_a_real_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package"
    facts = package / "shown-1.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: shown\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[uvcc.sinks]\nshown = shown_sink:Sink\n")
    (package / "shown_sink.py").write_text(PLUGGED)
    monkeypatch.syspath_prepend(str(package))
    out = tmp_path / "run"
    cfg = small(steps=4, log_every=2, eval_every=4, eval_batches=1, sinks="shown", project="tries")
    assert worker.train(cfg, out, "lm") == 0
    assert (out / "sink_shown.log").read_text() == ""
    run, project, steps, rows, status = json.loads((out / "told.json").read_text())
    assert (run, project, steps, status) == ("lm", "tries", 4, "done")
    assert [(step, names[0].partition("/")[0]) for step, names in rows] == [(2, "train"), (4, "train"), (4, "val")]
    assert "sink_failed" not in (out / "events.jsonl").read_text()
    with pytest.raises(ConfigError, match="'other', which is unknown"):
        worker.train(replace(cfg, train=replace(cfg.train, sinks="other")), tmp_path / "none", "lm")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_real_libraries_hold_what_the_training_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow's file store and W&B's offline file, each read by its own library; then the training goes on in both."""
    for name in [n for n in os.environ if n.startswith(("MLFLOW_", "WANDB_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setitem(PATIENCE_S, "done", 200.0)
    out = tmp_path / "run"
    for steps in (4, 6):
        cfg = small(steps=steps, log_every=2, save_every=2, sinks="mlflow, wandb", project="tries")
        assert worker.train(cfg, out, "run") == 0
    assert "sink_failed" not in (out / "events.jsonl").read_text(), (out / "sink_mlflow.log").read_text()
    seen = subprocess.run(
        [sys.executable, "-c", READ, str(out)], capture_output=True, text=True, timeout=500, check=True
    )
    found = json.loads(seen.stdout)
    rows = [row.split(",") for row in (out / "training.csv").read_text().splitlines()]
    losses = {row[0]: float(row[rows[0].index("loss")]) for row in rows[1:]}
    assert sorted(losses, key=int) == ["2", "4", "6"]
    for library in ("mlflow", "wandb"):
        assert found[library]["losses"] == pytest.approx(losses, rel=1e-3), library
    assert found["mlflow"]["params"]["train.lr"] == "0.01"
    assert found["mlflow"]["experiment"] == "tries"
    assert found["mlflow"]["status"] == "FINISHED"
    assert found["wandb"]["runs"] == [[(out / TRAINING).read_text(), "tries"]] * 2


READ = """
import json, os, sys
from pathlib import Path
out = Path(sys.argv[1])
os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
from mlflow import MlflowClient
client = MlflowClient((out / "mlruns").as_uri())
run_id = (out / "mlflow_run.txt").read_text()
run = client.get_run(run_id)
losses = {str(m.step): m.value for m in client.get_metric_history(run_id, "train/loss")}
experiment = client.get_experiment(run.info.experiment_id).name
ml = {"losses": losses, "params": run.data.params, "experiment": experiment, "status": run.info.status}
import struct
from wandb.proto import wandb_internal_pb2 as pb
BLOCK = 1 << 15
def records(data):  # the log format of LevelDB behind a header of seven bytes
    at, whole = 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # all of a record, or its last part
            yield pb.Record.FromString(whole)
            whole = b""
rows, runs = {}, []
for path in sorted((out / "wandb").glob("offline-run-*/*.wandb")):
    for record in records(path.read_bytes()):
        if record.HasField("run"):
            runs.append([record.run.run_id, record.run.project])
        if record.HasField("history"):
            row = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
            rows[str(row["step"])] = row["train/loss"]
print(json.dumps({"mlflow": ml, "wandb": {"losses": rows, "runs": runs}}))
"""
