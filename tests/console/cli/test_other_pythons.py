"""Other Pythons than this one: each gets an installation of its own, and its demo ends verified."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
NEWEST = 20


def others() -> list[str]:
    """Those that ``UVCC_PYTHONS`` names, with a colon between two; else all on the PATH that uvcc runs on."""
    if named := os.environ.get("UVCC_PYTHONS"):
        return named.split(":")
    minors = (n for n in range(11, NEWEST) if n != sys.version_info.minor)
    return [found for n in minors if (found := shutil.which(f"python3.{n}"))]


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("UVCC_", "PYTHON"))}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=plain | env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(7200)  # an installation each, of gigabytes where no torch for processors alone is at hand
def test_the_demo_ends_verified_on_each(tmp_path: Path) -> None:
    assert others(), "no other Python is on the PATH: name some in UVCC_PYTHONS"
    for number, python in enumerate(others()):
        folder = tmp_path / str(number)
        run("git", "clone", "-q", ROOT, folder / "uvcc", cwd=tmp_path)
        run(python, "-m", "venv", folder / "venv", cwd=tmp_path)
        run(folder / "venv/bin/pip", "install", "-q", ".[local]", cwd=folder / "uvcc")
        said = run(folder / "venv/bin/uvcc", "demo", "--headless", "--json", cwd=folder, UVCC_HOME=str(folder / "home"))
        summary = json.loads(said)
        assert (summary["verified"], summary["leaks"]) == (True, []), python
        assert summary["accuracy"] > 0.95, python
