"""The commands of the manual, as they stand there: from a CSV file to a verified training and a clear prediction."""

from __future__ import annotations

import csv
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from demorun import PATIENCE_S, PATIENT, Uvcc, user_at
from safetensors.numpy import load_file

from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.data.features import prepare, transform
from uvcc_engine.data.schema import load_schema
from uvcc_engine.data.sets import Floats
from uvcc_engine.data.table_files import read_table
from uvcc_engine.model.definition.specs import find_model
from uvcc_engine.model.learning.plaintext import forward, train_plaintext
from uvcc_engine.transcript.terms.policy import Policy

PAGE = Path(__file__).parents[3] / "docs" / "tutorials" / "own-table.md"

pytestmark = [pytest.mark.ci("tests/engine/private/test_own_data_predictions.py"), pytest.mark.timeout(600)]


def commands() -> list[list[str]]:
    """The commands between the page's marks, without ``uvcc``."""
    text = PAGE.read_text().partition("<!-- own data:")[2].partition("<!-- /own data -->")[0]
    lines = text.partition("```sh\n")[2].partition("```")[0].splitlines()
    found = [shlex.split(line, comments=True) for line in lines]
    assert all(words[0] == "uvcc" for words in found)
    return [words[1:] for words in found]


def write_patients(folder: Path) -> None:
    """scikit-learn's breast cancer data; ``new.csv`` has the first twenty patients without their diagnosis."""
    found = pytest.importorskip("sklearn.datasets").load_breast_cancer()
    rows = [[*map(repr, map(float, x)), found.target_names[y]] for x, y in zip(found.data, found.target, strict=True)]
    header = [*map(str, found.feature_names), "diagnosis"]
    for name, part in (("patients.csv", [header, *rows]), ("new.csv", [row[:-1] for row in [header, *rows[:20]]])):
        with (folder / name).open("w", newline="") as file:
            csv.writer(file).writerows(part)


@pytest.fixture
def uvcc(tmp_path: Path) -> Iterator[Uvcc]:
    with user_at(tmp_path / "home") as user:
        yield user


def clear_predictions(run_dir: Path, folder: Path) -> Floats:
    """Every patient's probabilities by the run's plaintext twin."""
    job = PrivateJob.from_json(json.loads((run_dir / "artifacts/full/policy.json").read_text())["job"])
    table = read_table(folder / "patients.csv")
    made = prepare(table, load_schema(folder / "patients.schema.yaml"))
    weights = [torch.from_numpy(w) for w in train_plaintext(job, made.data).weights]
    x = torch.from_numpy(transform(table, made.schema))
    return torch.softmax(forward(find_model(job.model), weights, x), 1).numpy()


def check_card(results: Path, run_dir: Path) -> None:
    """The card says what the policy and the certificate say; the tensors are the same in both formats."""
    card = (results / "MODEL_CARD.md").read_text()
    policy = Policy.load(run_dir / "artifacts/full/policy.json")
    assert f"- policy: {policy.hash.hex()}" in card
    assert "- result: verified at" in card
    assert "- accuracy: 0." in card
    assert "sealed to the owner's key: weights" in card
    assert "could look at everything" in card
    assert all(f"- `{name}`" in card for name in ("model.safetensors", "model.json", "preprocessing.yaml"))
    with np.load(results / "weights.npz") as arrays:
        tensors = load_file(results / "model.safetensors")
        assert tensors.keys() == set(arrays.files)
        assert all(np.array_equal(tensors[name], arrays[name]) for name in tensors)


def test_five_commands_lead_from_a_file_to_predictions(uvcc: Uvcc, tmp_path: Path) -> None:
    steps = commands()
    assert len(steps) <= 5
    write_patients(tmp_path)
    for words in steps:
        patient = [word for setting in PATIENT for word in ("--set", setting)]
        short = ["--steps", "12", "--seed", "3", *patient] if words[0] == "demo" else []
        done = subprocess.run(
            [sys.executable, "-m", "uvcc_console.cli.main", *words, *short],
            cwd=tmp_path,
            env=uvcc.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, (words, done.stdout, done.stderr)
    with (tmp_path / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 20
    assert set(rows[0]) == {"row", "diagnosis", "p(benign)", "p(malignant)"}
    results = tmp_path / "results"
    files = {"weights.npz", "model.safetensors", "model.json", "preprocessing.yaml", "MODEL_CARD.md"}
    assert {path.name for path in results.iterdir()} == files
    (run_dir,) = (uvcc.home / "runs").iterdir()
    check_card(results, run_dir)
    ours = np.array([[float(row["p(benign)"]), float(row["p(malignant)"])] for row in rows])
    assert np.abs(ours - clear_predictions(run_dir, tmp_path)[:20]).max() < 0.01
    fitted = (results / "preprocessing.yaml").read_text()
    shift = fitted.partition("shift: ")[2].partition(",")[0].encode()
    assert len(shift) > 8
    kept = [path for path in run_dir.rglob("*") if path.is_file() and shift in path.read_bytes()]
    assert kept == [run_dir / "owner" / "preprocessing.yaml"]  # the statistics are the owner's, nobody else's
    assert not [path for path in uvcc.temp.rglob("*") if path.is_file() and shift in path.read_bytes()]
