"""``job.code`` on a rented pod: uploaded without what git ignores, set up, drilled, home again, nothing billing."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from folder_trainer import FOLDERS_TRAINER
from primefake import KEY
from primehost import PrimeHost

from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import iter_events

PATIENCE_S = 300.0
SETUP = """cp lib/helper.py "$(python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')\""""


def _folder(code: Path) -> Path:
    """A repository with a trainer, its library, and what is to stay here."""
    (code / "lib").mkdir(parents=True)
    (code / "train.py").write_text(FOLDERS_TRAINER)
    (code / "lib" / "helper.py").write_text("import time\nWORD = 'hello'\ndef work(): time.sleep(0.02)\n")
    for name, text in ((".gitignore", "*.bin\n"), ("data.bin", "x" * 1000), (".env", "SECRET=1\n")):
        (code / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(code)], check=True)
    return code


@pytest.mark.slow
@pytest.mark.timeout(0)
async def test_a_folder_goes_to_a_rented_pod_and_its_artifacts_come_home(tmp_path: Path, short: Path) -> None:
    (short / "market").mkdir()
    profile = {
        "job": {
            "kind": "command",
            "argv": ["python", "train.py"],
            "steps": 120,
            "code": str(_folder(tmp_path / "trainer")),
            "setup": SETUP,
            "artifacts": ["out/**"],
        },
        "fleet": {"provider": "prime", "gpu": "CPU_NODE"},
        "smoke": {"steps": 100},
        "gates": {"loss_falls": True, "halt_drill_s": 60},
        "limits": {"hourly": 2, "total": 5, "wait": "60s"},
    }
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(profile))
    env = {k: v for k, v in os.environ.items() if not k.startswith(("UVCC_", "PRIME_"))}
    env |= {"UVCC_HOME": str(short / "home"), "UVCC_PRIME_API_KEY": KEY, "OMP_NUM_THREADS": "1"}
    async with PrimeHost(short / "market") as host:
        command = [sys.executable, "-m", "uvcc_console.cli.main", "rollout", str(tmp_path / "theirs.yaml")]
        command += ["--headless", "--yes", "--json", "--set", f"fleet.base_url={host.url}"]
        process = await asyncio.create_subprocess_exec(
            *command, env=env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(PATIENCE_S):
            out, err = await process.communicate()
        assert process.returncode == 0, out.decode() + err.decode()
        assert host.fake.billing == []
    said = json.loads(out)
    assert (said["status"], said["leaks"]) == ("ok", [])
    (run_dir,) = (short / "home" / "runs").iterdir()
    artifacts = run_dir / "artifacts"
    for phase, steps in (("smoke", 100), ("full", 120)):
        assert (artifacts / phase / "p0r0" / "files" / "out" / "model.txt").read_text() == f"hello {steps}"
    record = json.loads((artifacts / "code.json").read_text())
    assert [f["path"] for f in record["files"]] == [".gitignore", "lib/helper.py", "train.py"]
    assert any(name.startswith(".env") for name in record["left_out"])
    stages = [e for _, e in iter_events(run_dir / "journal.sqlite") if isinstance(e, ev.StageChanged)]
    drilled = [e.detail for e in stages if (e.name, e.status) == ("drill", "ok")]
    assert len(drilled) == 1
    assert drilled[0].startswith("1/1 held and released")  # by its control file, on the rented pod
