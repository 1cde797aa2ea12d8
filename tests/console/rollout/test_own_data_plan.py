"""What a profile leaves to the owner's data: filled in by the owner's program before anything is rented, or refused."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from uvcc_console.cli import common
from uvcc_console.cli.main import main
from uvcc_console.cli.parties.data import infer_schema, settings_for
from uvcc_console.cli.screen import launch as launching
from uvcc_console.core import paths
from uvcc_console.plan import owndata, plan_rehearsal
from uvcc_console.plan.plan import engine_job, make_plan
from uvcc_console.plan.profile import load, parse
from uvcc_console.plan.schema import PrivateJobSettings
from uvcc_console.plan.step_forecast import apart, here
from uvcc_console.rollout.stages.training.agree import check_job
from uvcc_console.runs.processes import create_run
from uvcc_engine.contract.errors import ConfigError, UvccError
from uvcc_engine.contract.machine import host

LAYERS = "job.model=[{linear: 4}, relu, linear]"
WORKERS = ["--workers", "--replicas", "--stages", "--tensor", "--microbatches", "--link"]
TOOK = {"wall": 0.1, "low": 0.08, "high": 0.2, "early": 1.5, "party_cpu": 0.05, "all_cpu": 0.15, "cores": 2.0}
TOOK |= {"replicas": 1, "workers": 3}
REHEARSED = {
    "rounds": 20,
    "bytes": 1e5,
    "busiest": 1.5,
    "seconds": 0.1,
    "layers": [],
    "warnings": ["tight"],
    "most_frac_bits": 20,
}
REHEARSED |= {"processes": TOOK, "memory": {"pod_mib": 512.0, "all_mib": 1400.0}}
MOST = 8  # workers of a party that are rehearsed
FLEET = {"rounds": 38.0, "bytes": 9e5, "pod_bytes": 15e4, "chain": 30.0}


@pytest.fixture(autouse=True)
def rehearsals(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A rehearsal takes seconds, and is tried for itself in test_step_rehearsal.py: the jobs that one was asked of."""
    asked: list[str] = []

    def rehearse(args: Sequence[str], command: str) -> str:
        assert command == "rehearse"
        flags = [flag for flag in args if flag.startswith("--")][1:]
        assert [flag for flag in flags if flag not in ("--apart", "--rows")] == WORKERS
        asked.append(Path(args[1]).read_text())
        if "1.23" in asked[-1]:
            raise ConfigError("with job.frac_bits 16 numbers overflow in the rehearsal: layer 0")
        workers, replicas = int(args[args.index("--workers") + 1]), int(args[args.index("--replicas") + 1])
        took = TOOK | {"replicas": 1 if "--apart" in args else replicas, "workers": 3 * workers}
        several = {"fleet": FLEET, "processes": took} if 1 < workers <= MOST else {}
        return json.dumps(REHEARSED | several)

    monkeypatch.setattr(plan_rehearsal, "owners_program", rehearse)
    return asked


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table, and the schema that is inferred of it, once for all tests."""
    rng = np.random.default_rng(1)
    path = tmp_path_factory.mktemp("described") / "patients.csv"
    with path.open("w", newline="") as file:
        rows = ([f"{a:.6f}", f"{b:.6f}", "sick" if a > b else "well"] for a, b in rng.normal(size=(50, 2)))
        csv.writer(file).writerows([["a", "b", "diagnosis"], *rows])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UVCC_HOME", str(path.parent / "home"))
        assert main(["data", "infer", str(path)]) == 0
    return path


@pytest.fixture
def table(described: Path, tmp_path: Path) -> Path:
    return shutil.copy(described, tmp_path / described.name)


@pytest.fixture
def settings(described: Path, table: Path) -> list[str]:
    schema = table.with_name("patients.schema.yaml")
    shutil.copy(described.with_name(schema.name), schema)
    return [f"job.data={table}", f"job.schema={schema}", LAYERS]


def job_of(run_dir: Path) -> dict[str, Any]:
    return dict(common.load_snapshot(run_dir).profile["job"])


def test_a_run_is_planned_with_the_shapes_and_rows_of_its_data(settings: list[str]) -> None:
    run_dir = create_run("demo", settings)
    profile = parse(dict(common.load_snapshot(run_dir).profile))  # as the conductor reads it
    job = engine_job(profile.job, 3)
    assert (job["model"]["features"], job["model"]["classes"]) == (2, 2)
    assert [layer["type"] for layer in job["model"]["layers"]] == ["dense", "relu", "dense"]
    assert 0 < job["test_rows"] < 25
    assert not [value for key, value in job.items() if "patients" in str(value)]  # no path goes into a policy
    pin = owndata.pin_file(run_dir)
    assert set(json.loads(pin.read_text())) == {"data", "schema"}
    assert pin.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.ci(__file__)
def test_the_schema_says_that_rows_have_weights_and_the_policy_says_so(table: Path, settings: list[str]) -> None:
    schema = table.with_name("patients.schema.yaml")
    text = schema.read_text()
    schema.write_text(text.replace("columns:\n", "weight: b\ncolumns:\n").replace("  b: {kind: standardise}\n", ""))
    table.write_text(table.read_text().replace("-", ""))  # a weight is not negative
    asked = [*settings, "job.class_weights=[1,3]", "job.label_smoothing=0.1"]
    job = engine_job(parse(dict(common.load_snapshot(create_run("demo", asked)).profile)).job, 3)
    assert (job["row_weights"], job["class_weights"], job["label_smoothing"]) == (True, [1.0, 3.0], 0.1)
    schema.write_text(text)
    with pytest.raises(UvccError, match=r"job\.row_weights, and the schema names no weight"):
        create_run("demo", [*settings, "job.row_weights=true"])
    with pytest.raises(UvccError, match="class_weights"):
        create_run("demo", [*settings, "job.class_weights=[1,0]"])


@pytest.mark.ci(__file__)
def test_a_rollout_of_ones_own_refuses_what_a_rehearsal_refuses_and_rehearses_a_job_once(
    settings: list[str], rehearsals: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = common.run_dirs()
    for _ in range(2):  # a refusal is not kept
        with pytest.raises(ConfigError, match="numbers overflow in the rehearsal: layer 0"):
            create_run("demo", [*settings, "job.lr=1.23"])
    assert common.run_dirs() == before
    assert len(rehearsals) == 2
    sets = [part for one in settings for part in ("--set", one)]
    assert main(["plan", "demo", *sets]) == 0
    told: list[str] = []
    s = common.load_snapshot(create_run("demo", settings, tell=told.append))
    assert len(rehearsals) == 3  # the plan's was kept
    assert "tight" in told
    assert s.foretold is not None
    assert (s.foretold.rounds, s.foretold.bytes, s.foretold.seconds) == (20, 3e5, pytest.approx(0.1 / 0.95))
    shipped = common.load_snapshot(create_run("demo"))
    assert (shipped.foretold, len(rehearsals)) == (None, 3)  # shipped data and model: tried already
    assert main(["plan", "demo", "--set", "topology.replicas=2"]) == 0
    assert common.load_snapshot(create_run("demo")).foretold is None  # other workers: not what was planned
    assert common.load_snapshot(create_run("demo", ["topology.replicas=2"])).foretold is not None
    cut = ["topology.stages=2", "topology.microbatches=2"]
    assert main(["plan", "demo", "--set", cut[0], "--set", cut[1]]) == 0
    split = common.load_snapshot(create_run("demo", cut))
    assert split.foretold is not None
    assert (split.foretold.rounds, split.foretold.bytes) == (38, 9e5)
    assert 0 < split.foretold.low < split.foretold.seconds < split.foretold.high
    damaged = next((paths.data_dir() / "rehearsals").iterdir())
    for file in damaged.parent.iterdir():
        file.write_text('{"rounds": "many"}')
    create_run("demo", settings)
    assert len(rehearsals) == 6


def test_a_list_of_layers_needs_no_schema(tmp_path: Path) -> None:
    job = job_of(create_run("demo", [LAYERS]))
    assert (job["model"]["features"], job["model"]["classes"], job["test_rows"]) == (64, 10, 360)
    np.savez(tmp_path / "d.npz", x=np.zeros((9, 5)), y=np.arange(9) % 3)
    job = job_of(create_run("demo", [LAYERS, f"job.data={tmp_path / 'd.npz'}"]))
    assert (job["model"]["features"], job["model"]["classes"]) == (5, 3)


@pytest.mark.parametrize(
    ("change", "setting", "what"),
    [
        (lambda t: t.replace("a,b,", "a,c,"), "", "patients.csv has no column 'b' .there are a, c, diagnosis"),
        pytest.param(
            lambda t: t.replace("\n", "\nx,1,sick\n", 1),
            "",
            r"row 1 \(line 2\), column 'a' holds 'x'",
            marks=pytest.mark.ci(__file__),
        ),
        pytest.param(
            lambda t: t.replace("\n", "\n1,inf,sick\n", 1),
            "",
            r"column 'b' holds 'inf', which is not finite",
            marks=pytest.mark.ci(__file__),
        ),
        pytest.param(
            lambda t: t.replace("\n", "\n1,1,\n", 1), "", "column 'diagnosis' is empty", marks=pytest.mark.ci(__file__)
        ),
        (str, "job.model=[{linear: 4}, rellu, linear]", r"job.model\[1\]: unknown layer 'rellu' .did you mean 'relu'"),
        (str, "job.model=mlp-digits", "the data has 2 features and 2 classes, mlp-digits takes 64 and 10"),
        (str, "job.model=mlp-digit", "did you mean 'mlp-digits'"),
        (str, "job.schema=/nowhere.yaml", "cannot read /nowhere.yaml"),
        (str, "job.model=3", "wants a model's name, or a list of layers"),
        (str, 'job.data=""', "job.schema describes the table in job.data"),
    ],
)
def test_what_does_not_fit_is_refused_before_there_is_a_run(
    settings: list[str], table: Path, change: Callable[[str], str], setting: str, what: str
) -> None:
    table.write_text(change(table.read_text()))
    before = common.run_dirs()
    with pytest.raises(UvccError, match=what):
        create_run("demo", [*settings, *([setting] if setting else [])])
    assert common.run_dirs() == before


async def test_data_that_changed_since_the_plan_is_refused_before_a_pod_is_rented(
    settings: list[str], table: Path
) -> None:
    run_dir = create_run("demo", settings)
    profile = parse(dict(common.load_snapshot(run_dir).profile))
    ctx: Any = SimpleNamespace(plan=make_plan("r", "demo", profile), run_dir=run_dir, federated=None)
    await check_job(ctx)
    table.write_text(table.read_text().replace("sick", "well", 1))
    with pytest.raises(UvccError, match=r"patients\.csv has changed since the run was planned"):
        await check_job(ctx)


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("os.kill(os.getpid(), 15)", "was ended by SIGTERM: somebody stopped it"),
        ("os.kill(os.getpid(), 9)", "was ended by SIGKILL: most often the system had no memory left"),
        ("os._exit(3)", "ended with exit code 3 and said nothing"),
    ],
)
def test_an_owners_program_that_is_stopped_says_how_and_what_to_do(
    end: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable}\nimport os\n{end}\n")
    program.chmod(0o700)
    monkeypatch.setattr(owndata.sys, "executable", str(program))
    with pytest.raises(UvccError, match=told) as stopped:
        owndata.owners_program(["plan"])
    assert stopped.value.hint == "nothing was begun; start it again"


def test_what_the_owners_program_says_of_its_waits_is_passed_on_at_once_and_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text(
        f"#!{sys.executable}\nimport sys\n"
        "sys.stderr.write('waits: for an answer\\nwaits: for an answer still\\n')\n"
        "sys.stdout.write('1,0\\n' * 100000)\n"  # more than a pipe holds
        "sys.stderr.write('error: nobody answered\\n' if 'fail' in sys.argv else '')\n"
        "sys.exit(2 if 'fail' in sys.argv else 0)\n"
    )
    program.chmod(0o700)
    monkeypatch.setattr(owndata.sys, "executable", str(program))
    told: list[str] = []
    assert owndata.owners_program_that_waits(["rows"], "ask", told.append) == "1,0\n" * 100000
    assert told == ["waits: for an answer", "waits: for an answer still"]
    with pytest.raises(ConfigError, match="nobody answered"):
        owndata.owners_program_that_waits(["fail"], "ask", told.append)


def test_the_objective_follows_the_schemas_target(tmp_path: Path) -> None:
    table = tmp_path / "houses.csv"
    table.write_text("size,price\n" + "".join(f"{i % 17},{1000.5 + 3 * i}\n" for i in range(60)))
    sets = settings_for(str(table))
    told: list[str] = []
    profile, _ = owndata.settle(load("demo", sets)[1], told.append)
    assert isinstance(profile.job, PrivateJobSettings)
    assert (profile.job.objective, profile.job.reveal) == ("mse", ["loss", "rmse", "weights"])
    assert profile.job.model["classes"] == 1
    assert any("objective mse" in line for line in told)
    profile, _ = owndata.settle(load("demo", [*sets, "job.objective=huber"])[1], told.append)
    assert isinstance(profile.job, PrivateJobSettings)
    assert profile.job.objective == "huber"


@pytest.mark.ci(__file__)
def test_trees_are_planned_on_bits_and_ask_for_a_step_each(
    table: Path, settings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    trees = "job.model=[{trees: {count: 5, depth: 2}}]"
    asked = [*settings[:2], trees, "job.batch=20", "job.reveal=[loss, auc]"]
    with pytest.raises(UvccError, match=r"feature 'a' holds .*, and trees ask bits"):
        create_run("demo", asked)
    assert main(["data", "infer", str(table), "--force", "--bins", "4"]) == 0
    assert "6 features (2 bins)" in capsys.readouterr().out
    told: list[str] = []
    plain = table.with_name("plain.yaml")
    plain.write_text("job: {kind: private, steps: 5}\ntopology: {}\nfleet: {provider: local}\n")
    job = job_of(create_run(str(plain), asked, tell=told.append))
    assert (job["objective"], job["momentum"], job["schedule"], job["steps"]) == ("binary", 0, "constant", 5)
    assert "trees ask for momentum 0.0, schedule constant" in told
    job = job_of(create_run(str(plain), [one for one in asked if "batch" not in one], tell=told.append))
    named = [
        "--model",
        '[{"trees": 5}]',
        "--data",
        str(table),
        "--schema",
        str(table.with_name("patients.schema.yaml")),
    ]
    assert job["batch"] == json.loads(owndata.owners_program(["plan", *named]))["rows"]["train"]
    assert f"trees ask for momentum 0.0, schedule constant, batch {job['batch']}" in told
    two = job_of(create_run(str(plain), [*[one for one in asked if "batch" not in one], "topology.replicas=2"]))
    assert two["batch"] == job["batch"] // 2
    schema = table.with_name("patients.schema.yaml")
    schema.write_text(schema.read_text().replace("{kind: bins, bins: 4}", "minmax", 1))
    with pytest.raises(UvccError, match=r"feature 'a' holds .*, and trees ask bits"):
        create_run("demo", asked)
    with pytest.raises(UvccError, match="--bins 1"):
        infer_schema(table, force=True, bins=1)
    schema.unlink()
    demo = settings_for(str(table), model=trees.partition("=")[2])
    ours = {"job.steps=5", "job.momentum=0", "job.schedule=constant", "job.lr=0.3", f"job.batch={job['batch']}"}
    assert ours <= set(demo)
    assert "kind: bins, bins: 16" in schema.read_text()
    schema.unlink()
    assert "job.momentum=0" not in settings_for(str(table), model="streets.py:Model")
    assert "kind: bins" not in schema.read_text()


@pytest.mark.ci(__file__)
def test_a_demo_on_trees_by_their_name_and_on_a_target_that_the_schema_names_already(
    table: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs: list[list[str]] = []
    monkeypatch.setattr(launching, "launch", lambda _, given, **options: pairs.append(given) or 0)
    asked = ["demo", "--headless", "--data", str(table), "--model", "trees"]
    assert main([*asked, "--target", "diagnosis"]) == 0
    assert main([*asked, "--target", "diagnosis"]) == 0, "the schema that the first one wrote says the same"
    job = job_of(create_run("demo", pairs[1]))
    assert (job["model"]["layers"][0]["type"], job["steps"], job["momentum"]) == ("trees", 20, 0)
    assert main([*asked, "--target", "a"]) == 2
    said = capsys.readouterr().err
    assert "says that the target is diagnosis, not a" in said
    assert "uvcc data infer --force --target COLUMN FILE" in said
    assert main([*asked[:-1], "gradient-boosting"]) == 0
    with pytest.raises(UvccError, match=r"'gradient-boosting' .*mlp-digits, .*; or a list of layers, or file.py:Model"):
        create_run("demo", pairs[2])


@pytest.mark.ci(__file__)
def test_k_means_is_planned_without_a_target_and_asks_for_steps_of_all_rows(
    table: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    schema, clusters = table.with_name("patients.schema.yaml"), "job.model=[{kmeans: 3}]"
    sets = [f"job.data={table}", f"job.schema={schema}", "job.steps=4"]
    plain = table.with_name("plain.yaml")
    plain.write_text("job: {kind: private}\ntopology: {}\nfleet: {provider: local}\n")
    assert main(["data", "infer", str(table), "--no-target", "--target", "a"]) == 2
    assert "--target and --no-target say different things" in capsys.readouterr().err
    assert main(["data", "infer", str(table)]) == 0
    with pytest.raises(UvccError, match=r"k-means for \d outputs"):
        create_run(str(plain), [*sets, clusters])
    assert main(["data", "infer", str(table), "--no-target", "--force"]) == 0
    assert "no target" in capsys.readouterr().out
    with pytest.raises(UvccError, match=r"the schema names no target, and job\.model learns"):
        create_run(str(plain), [*sets, "job.model=[linear]"])
    told: list[str] = []
    job = job_of(create_run(str(plain), [*sets, clusters], tell=told.append))
    assert (job["objective"], job["momentum"], job["schedule"], job["lr"]) == ("inertia", 0, "constant", 1)
    assert (job["reveal"], job["batch"] + job["test_rows"]) == (["loss", "inertia"], 50)
    assert f"k-means asks for momentum 0.0, schedule constant, lr 1.0, batch {job['batch']}" in told
    schema.unlink()
    pairs: list[list[str]] = []
    monkeypatch.setattr(launching, "launch", lambda _, given, **options: pairs.append(given) or 0)
    assert main(["demo", "--headless", "--data", str(table), "--model", "kmeans", "--target", "a"]) == 2
    assert "k-means learns no target" in capsys.readouterr().err
    assert main(["demo", "--headless", "--data", str(table), "--model", "kmeans"]) == 0
    made = job_of(create_run("demo", pairs[0]))
    assert (made["model"]["classes"], made["lr"], made["batch"]) == (3, 1, job["batch"])
    assert made["reveal"] == ["loss", "inertia", "weights"]


def test_a_plan_names_the_schema_that_lies_beside_the_table_and_nobody_named(tmp_path: Path) -> None:
    table = tmp_path / "houses.csv"
    table.write_text("id,size,big\n" + "".join(f"{i},{i % 17},{i % 2}\n" for i in range(60)))
    settings_for(str(table))  # writes it
    sets = [f"job.data={table}", "job.model=[linear]", "job.steps=2"]
    with pytest.raises(UvccError, match=r"houses\.schema\.yaml lies beside .*houses\.csv") as refused:
        owndata.settle(load("demo", sets)[1], print)
    assert f"say `schema: {tmp_path / 'houses.schema.yaml'}` under job" in refused.value.hint
    load(
        "demo", [f"job.data={table}", f"job.labels={table}", "job.schema=none"]
    )  # no schema that labels could contradict
    profile, _ = owndata.settle(load("demo", [*sets, "job.schema=none"])[1], print)
    assert isinstance(profile.job, PrivateJobSettings)
    assert profile.job.model["features"] == 2


@pytest.mark.parametrize(
    ("sets", "steps"),
    [(["job.epochs=3", "job.batch=100"], 44), (["job.epochs=1", "job.batch=100", "topology.replicas=2"], 8)],
)
def test_epochs_are_passes_over_the_training_rows(sets: list[str], steps: int) -> None:
    profile, _ = owndata.settle(load("demo", sets)[1], print)
    assert isinstance(profile.job, PrivateJobSettings)
    assert profile.job.steps == steps  # 1,437 of the digits' rows train
    assert "epochs" not in engine_job(profile.job, profile.job.steps)


def test_whoever_gives_epochs_needs_no_steps() -> None:
    given = {"job": {"kind": "private", "epochs": 3, "batch": 100}, "fleet": {"provider": "local"}}
    profile, _ = owndata.settle(parse(given), print)
    assert isinstance(profile.job, PrivateJobSettings)
    assert profile.job.steps == 44
    for job in ({"kind": "private"}, {"kind": "private", "epochs": 0}, {"kind": "lm", "epochs": 3}):
        with pytest.raises(ConfigError, match=r"job\.steps is missing|unknown key job\.epochs"):
            parse({**given, "job": job})
    with pytest.raises(ConfigError, match=r"job\.epochs is 'many' \(wants a whole number\)"):
        parse({**given, "job": {"kind": "private", "epochs": "many"}})


def test_the_key_is_called_schema_in_profiles_and_in_what_is_said_of_them(table: Path) -> None:
    _, profile = load("demo", [f"job.data={table}", "job.schema=x.yaml"])
    assert isinstance(profile.job, PrivateJobSettings)
    assert profile.job.data_schema == "x.yaml"
    with pytest.raises(ConfigError) as caught:
        load("demo", ["job.schemma=x.yaml"])
    assert caught.value.hint == "did you mean job.schema?"


def test_a_demo_on_a_table_needs_no_profile(
    table: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sets: list[list[str]] = []
    monkeypatch.setattr(launching, "launch", lambda _, pairs, **options: sets.append(pairs) or 0)
    assert main(["demo", "--headless", "--data", str(table), "--target", "diagnosis"]) == 0
    assert "50 rows, 2 features" in capsys.readouterr().err
    assert table.with_name("patients.schema.yaml").exists()
    profile, _ = owndata.settle(load("demo", sets[0])[1], print)
    assert isinstance(profile.job, PrivateJobSettings)
    assert profile.job.model["features"] == 2
    assert profile.job.reveal == ["loss", "accuracy", "weights"]
    assert main(["demo", "--headless", "--data", str(table), "--model", "[linear]"]) == 0
    assert sets[1][-1] == "job.model=[linear]"
    assert main(["demo", "--headless", "--data", str(table), "--target", "a"]) == 2
    assert "says that the target is diagnosis, not a" in capsys.readouterr().err


def test_an_owner_opens_nothing_that_is_not_verified(settings: list[str]) -> None:
    run_dir = create_run("demo", settings)
    assert run_dir.parent == paths.runs_dir()
    assert main(["owner", "open", run_dir.name]) == 2
    assert not Path(run_dir.name).exists()


def test_the_schema_of_a_text_in_few_words_names_no_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.txt").write_text("the cat sat on the mat.\n" * 80)
    assert main(["data", "infer", "mine.txt"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.endswith(" features")
    assert first.startswith("mine.schema.yaml: ")


def test_an_owner_is_given_the_tokenizer_that_lies_beside_the_schema(tmp_path: Path) -> None:
    kept, out, other = tmp_path / "kept", tmp_path / "out", tmp_path / "other"
    for folder in (kept, out, other):
        folder.mkdir()
    (kept / "preprocessing.yaml").write_text("text: {}\n")
    owndata.give_fitted(kept / "preprocessing.yaml", other)
    (kept / "own_tokenizer.json").write_text("{}")
    owndata.give_fitted(kept / "preprocessing.yaml", out)
    assert [p.name for p in other.iterdir()] == ["preprocessing.yaml"]
    assert sorted(p.name for p in out.iterdir()) == ["own_tokenizer.json", "preprocessing.yaml"]
    assert {p.stat().st_mode & 0o777 for p in out.iterdir()} == {0o600}


def test_a_model_is_told_in_a_few_words() -> None:
    assert owndata.model_words("mlp-digits") == "mlp-digits"
    assert owndata.model_words([{"linear": 4}, "relu", "linear"]) == "linear relu linear"
    assert owndata.model_words({"layers": [{"type": "dense"}, {"type": "relu"}]}) == "dense relu"


@pytest.mark.ci(__file__)
def test_an_owner_is_told_how_many_rows_each_cluster_has(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, schema = tmp_path / "results", table.with_name("patients.schema.yaml")
    folder.mkdir()
    plain = "{kind: minmax, statistics: {}}"
    schema.write_text(f"columns: {{a: {plain}, b: {plain}, diagnosis: {{kind: drop}}}}\n")
    (folder / "preprocessing.yaml").write_text(schema.read_text())
    layer = {"type": "kmeans", "inputs": 2, "clusters": 2}
    (folder / "model.json").write_text(json.dumps({"classes": 2, "features": 2, "layers": [layer]}))
    np.savez(folder / "weights.npz", **{"weight.0": np.array([[9.0, 9.0], [0.0, 0.0]])})
    made = tmp_path / "said.csv"
    assert main(["owner", "predict", "--model", str(folder), "--data", str(table), "--out", str(made)]) == 0
    assert "50 rows (0 in cluster 0, 50 in cluster 1)" in capsys.readouterr().out
    first = next(csv.DictReader(made.open()))
    given = next(csv.DictReader(table.open()))
    assert first["cluster"] == "1"
    assert float(first["distance"]) == pytest.approx(np.hypot(float(given["a"]), float(given["b"])), rel=1e-4)


def test_a_plan_says_what_several_workers_of_a_party_take(capsys: pytest.CaptureFixture[str]) -> None:
    def said(*settings: str) -> str:
        assert main(["plan", "demo", *(part for one in settings for part in ("--set", one))]) == 0
        return capsys.readouterr().out

    one = said()
    sent = "0.30 MB of all parties, 0.15 MB of them from the one that sends most"
    assert f"a step     20 rounds, {sent}, and 0.050 s of one processor for the party with most" in one
    assert "as three processes took here now" in one
    assert "layers, as one worker" not in one
    cut = said("topology.stages=2", "topology.replicas=2")
    assert "a step     38 rounds at the worker with most, 30 messages in the longest chain" in cut
    assert ", 0.90 MB of all workers, and 0.050 s of computing for a party" in cut
    assert "as 12 processes took here now" in cut
    assert "layers, as one worker per party would compute them:" in cut
    many = said("topology.stages=3", "topology.tensor=3")
    assert f"a step     20 rounds, {sent}, and 0.050 s of one processor for the party with" in many
    assert "most to do, as one worker per party would take" in many
    run = common.load_snapshot(create_run("demo", ["topology.stages=3", "topology.tensor=3"]))
    assert run.foretold is not None
    assert (run.foretold.rounds, run.foretold.bytes, run.foretold.high) == (0, 0, 0)  # named as not foretold
    assert run.foretold.seconds > 0  # the times of halts follow from it


def test_a_plan_says_what_memory_the_workers_hold_and_where_there_is_less(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [1401.0]
    monkeypatch.setattr(host, "memory_mib", lambda: {"total_mib": 4096.0, "available_mib": free[0]})

    def said(profile: str, *settings: str) -> str:
        assert main(["plan", profile, *(part for one in settings for part in ("--set", one))]) == 0
        return capsys.readouterr().out

    assert "memory     0.50 GiB at most, held by the workers of a pod" in said("demo")
    assert "and this machine has" not in said("demo")
    free[0] = 1399.0
    short = "note: the workers hold up to 1.4 GiB, and this machine has 1.4 free: a smaller job.batch"
    assert short in said("demo")
    assert "this machine has" not in said("prime-smoke-r2"), "its pods are elsewhere"
    many = said("demo", "topology.stages=3", "topology.tensor=3")
    assert "memory  " not in many, "too many workers to be rehearsed: nothing is known of theirs"


def test_where_this_machine_cannot_rehearse_a_run_of_other_machines_goes_on_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    short = UvccError("the workers of a step would hold some 22 GiB here, and this machine has 8 free")

    def rehearse(args: Sequence[str], command: str) -> str:
        raise short

    monkeypatch.setattr(plan_rehearsal, "owners_program", rehearse)
    told: list[str] = []
    run = common.load_snapshot(create_run("prime-smoke-r2", [LAYERS], tell=told.append))
    assert run.foretold is None
    assert f"the run is not foretold: {short.what}" in told
    with pytest.raises(UvccError, match="would hold some 22 GiB here"):
        create_run("demo", [LAYERS])


def test_a_plan_says_where_pods_ask_for_less_memory_than_their_workers_hold(tmp_path: Path) -> None:
    profile = {
        "job": {"kind": "private", "model": "mlp-digits", "steps": 2},
        "fleet": {"provider": "kubernetes", "gpu": "H100", "image": "uvcc", "memory": 16},
    }
    plan = make_plan("r", "r", parse(profile))
    step: dict[str, Any] = REHEARSED | {"memory": {"pod_mib": 17 * 1024.0, "all_mib": 50 * 1024.0}}
    gib, doubt = plan_rehearsal.memory(plan, step, 1.0)
    assert gib == 17.0
    assert "a pod's workers hold up to 17.0 GiB, and fleet.memory asks for 16: more of it, or a smaller" in doubt
    assert plan_rehearsal.memory(plan, REHEARSED, 1.0) == (0.5, "")


def test_of_replicas_elsewhere_one_is_rehearsed_and_the_chain_of_messages_is_its_delay() -> None:
    step = REHEARSED | {"fleet": FLEET, "processes": TOOK | {"replicas": 1, "workers": 6}}
    found = apart(step, 0.02, 1e6)
    assert found.network_s == pytest.approx(30 * 0.01 + 1.5 * 15e4 / 1e6)
    assert found.seconds == pytest.approx(found.network_s + TOOK["party_cpu"])
    two, three = (here(step | {"processes": TOOK | {"replicas": 2}}, replicas) for replicas in (2, 3))
    assert two.seconds == pytest.approx(TOOK["wall"] / 0.95)
    assert three.seconds == pytest.approx((TOOK["wall"] + TOOK["all_cpu"] / 2 / TOOK["cores"]) / 0.95)


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What rehearsals are asked with from now on."""
    told: list[list[str]] = []

    def rehearse(args: Sequence[str], command: str) -> str:
        told.append(list(args))
        return json.dumps(REHEARSED)

    monkeypatch.setattr(plan_rehearsal, "owners_program", rehearse)
    return told


def test_a_rehearsal_is_told_where_the_pods_are(monkeypatch: pytest.MonkeyPatch) -> None:
    told = recorded(monkeypatch)
    assert main(["plan", "prime-smoke-r2"]) == 0
    assert main(["plan", "local-smoke-r2"]) == 0
    far, near = told
    assert "--apart" in far
    assert "--apart" not in near
    assert far[far.index("--replicas") + 1] == "2"


@pytest.mark.ci(__file__)
def test_a_rehearsal_of_trees_is_told_how_many_rows_they_answer(
    table: Path, settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = recorded(monkeypatch)
    create_run("demo", settings)
    assert main(["data", "infer", str(table), "--bins", "4", "--force"]) == 0
    create_run("demo", [*settings[:2], "job.model=[{trees: 5}]", "job.batch=10", "job.reveal=[loss, auc]"])
    layers, trees = told
    assert "--rows" not in layers
    assert 30 < int(trees[trees.index("--rows") + 1]) < 50  # of 50 rows, those that are not held out


@pytest.mark.ci(__file__)
def test_a_table_with_decimal_commas_becomes_the_same_job_as_with_points(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(3)
    rows = [f"{a:.3f};{b:.2f};{'Köln' if a > b else 'Bonn'}" for a, b in rng.normal(size=(60, 2))]
    jobs = []
    for name, first, lines in (("d", "sep=;\n", [row.replace(".", ",") for row in rows]), ("e", "", rows)):
        table = tmp_path / f"{name}.csv"
        table.write_text("\n".join([f"{first}Größe (m);b;Ort", *lines]), encoding="utf-8-sig")
        made = settings_for(str(table))
        assert ("numbers have decimal commas" in capsys.readouterr().err) == (name == "d")
        jobs.append(job_of(create_run("demo", made)))
        assert main(["data", "infer", str(table), "--bins", "4", "--force"]) == 0
        assert "(2 bins)" in capsys.readouterr().out
    assert {**jobs[0], "data": "", "data_schema": ""} == {**jobs[1], "data": "", "data_schema": ""}
    table.write_text("a;b\n1,5;x\n2,5;y\n1.5;x\n")
    assert main(["data", "infer", str(table), "--force"]) == 2
    assert "row 3 (line 4), column 'a' holds '1.5'" in capsys.readouterr().err
