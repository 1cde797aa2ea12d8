"""A plain installation has no torch: operators of pods elsewhere, data owners and auditors need none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from uvcc_console.cli.main import VERBS
from uvcc_engine.transcript.signing.identity import Identity

ROOT = Path(__file__).resolve().parents[3]
LEAN = ROOT / "tests" / "lean"
CONSOLE = "import sys; from uvcc_console.cli.main import main; sys.exit(main())"
ENGINE = "import sys; from uvcc_engine.cli import main; sys.exit(main())"


def lean(program: str, *args: str | Path, home: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(LEAN), "UVCC_HOME": str(home), "TERM": "dumb"}
    command = [sys.executable, "-c", program, *map(str, args)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, check=False)


def test_here_torch_is_indeed_absent(tmp_path: Path) -> None:
    asked = lean("import importlib.util as u; print([u.find_spec(m) for m in ('torch', 'numba')])", home=tmp_path)
    assert asked.stdout.strip() == "[None, None]"


def test_every_verb_is_there(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom uvcc_console.cli.main import main\n"
        "for verb in sys.argv[1:]:\n"
        "    try: main([verb, '--help'])\n"
        "    except SystemExit as left: assert left.code == 0, verb\n"
        "import uvcc_console.ui.app, uvcc_console.ui.home.home_app\n"
        "import uvcc_console.rollout.conductor, uvcc_console.haltd.__main__"
    )
    done = lean(code, *VERBS, home=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_demo_says_what_to_install(tmp_path: Path) -> None:
    done = lean(CONSOLE, "demo", "--headless", home=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "torch is not installed" in line
    assert line.endswith("(pip install 'uvcc[local]')")
    assert not (tmp_path / "runs").exists()


def test_the_doctor_warns_and_goes_on(tmp_path: Path) -> None:
    done = lean(CONSOLE, "doctor", "--json", home=tmp_path)
    assert done.returncode == 0, done.stderr
    found = {f["name"]: f for f in json.loads(done.stdout)}["local pods"]
    assert found["level"] == "warn"
    assert "uvcc[local]" in found["hint"]


def test_a_data_owner_shares_rows(tmp_path: Path) -> None:
    parties = [Identity.create(tmp_path / f"p{p}").public.to_json() for p in range(3)]
    (tmp_path / "parties.json").write_text(json.dumps(parties))
    (tmp_path / "job.json").write_text(json.dumps({"model": "mlp-digits", "steps": 2, "test_rows": 20}))
    rng = np.random.default_rng(3)
    np.savez(tmp_path / "rows.npz", x=rng.normal(size=(200, 64)), y=rng.integers(0, 10, 200))
    data = ("--data", tmp_path / "rows.npz")
    checked = lean(ENGINE, "share", "--check", tmp_path / "job.json", *data, home=tmp_path)
    assert json.loads(checked.stdout)["ok"], checked.stderr
    who = ("--parties", tmp_path / "parties.json", "--owner", tmp_path / "owner", "--out", tmp_path / "out")
    shared = lean(ENGINE, "share", "--job", tmp_path / "job.json", *who, *data, home=tmp_path)
    assert shared.returncode == 0, shared.stderr
    assert json.loads(shared.stdout)["rows"] == {"train": 180, "test": 20}
    assert sorted(p.name for p in (tmp_path / "out").glob("sealed-*")) == [f"sealed-p{p}.bin" for p in range(3)]


def test_a_torch_file_is_refused_with_the_hint(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(json.dumps({"model": "mlp-digits"}))
    (tmp_path / "rows.pt").write_bytes(b"never read")
    done = lean(ENGINE, "share", "--check", tmp_path / "job.json", "--data", tmp_path / "rows.pt", home=tmp_path)
    assert done.returncode == 2
    assert "uvcc[local]" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_replay_is_refused_with_the_hint(tmp_path: Path) -> None:
    done = lean(ENGINE, "audit", "--help", home=tmp_path)
    assert done.returncode != 0
    (line,) = done.stderr.strip().splitlines()
    assert "uvcc[local]" in line


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_plain_installation_has_no_torch_and_works(tmp_path: Path) -> None:
    """``pip install .`` into a new environment: what the tests above hide is truly absent, and nothing else is."""
    clone, venv = tmp_path / "clone", tmp_path / "venv"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    subprocess.run([str(venv / "bin" / "pip"), "install", "-q", str(clone)], check=True)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("UVCC_", "PYTHON"))}
    env |= {"UVCC_HOME": str(tmp_path / "home"), "HOME": str(tmp_path), "TERM": "dumb"}

    def ask(*words: str) -> subprocess.CompletedProcess[str]:
        command = [str(venv / "bin" / words[0]), *words[1:]]
        return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False)

    listed = json.loads(ask("pip", "list", "--format", "json").stdout)
    absent = {"torch", "numba", "matplotlib", "pytest"}
    assert not absent & {p["name"].lower() for p in listed}
    assert ask("uvcc", "--help").returncode == 0
    assert ask("uvcc", "doctor", "--json").returncode == 0
    assert ask("uvcc", "profiles").returncode == 0
    owner = ask("uvcc", "owner", "init")
    assert owner.returncode == 0, owner.stderr
    screens = "import uvcc_console.ui.app, uvcc_console.ui.home.home_app, uvcc_console.rollout.conductor"
    assert ask("python", "-c", screens).returncode == 0
