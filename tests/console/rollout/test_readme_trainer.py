"""README's trainer, as it stands there: obeys by itself, is planned without a doubt, and its drill holds it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import pytest

from uvcc_console.cli.main import main
from uvcc_console.plan import command_halt
from uvcc_console.plan.schema import CommandJobSettings
from uvcc_console.ui.drawing.glyphs import choose
from uvcc_console.ui.drawing.paint import plain
from uvcc_console.ui.feed.home_model import draft_lines, make_draft
from uvcc_engine.contract.run_files.control import HaltRequest, write_halt

ROOT: Final = Path(__file__).parents[3]
FILE: Final = re.compile(r"^<!-- file: ([\w.-]+) -->\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def written(folder: Path) -> dict[str, Path]:
    """README's files, written into the folder."""
    found = {}
    for name, text in FILE.findall((ROOT / "README.md").read_text(encoding="utf-8")):
        found[name] = folder / name
        found[name].write_text(text)
    return found


def test_readmes_trainer_is_held_released_and_halted_as_it_stands_there(tmp_path: Path) -> None:
    trainer = written(tmp_path)["trainer.py"]
    calls = [line for line in trainer.read_text().splitlines() if re.search(r"RunWriter|run\.|for step", line)]
    assert len(calls) <= 5, "five lines, as it is called"
    endless = trainer.read_text().replace("range(1, 61)", "range(1, 10**9)")  # its sixty steps are over in a second
    assert "10**9" in endless
    trainer.write_text(endless)
    run = tmp_path / "run"
    env = os.environ | {"UVCC_RUN_DIR": str(run), "UVCC_RUN": "mine", "UVCC_RANK": "0"}
    process = subprocess.Popen([sys.executable, str(trainer)], env=env, stderr=subprocess.PIPE, text=True)

    def said(what: str) -> bool:
        log = run / "events.jsonl"
        return log.exists() and any(
            json.loads(x)["event"] == what for x in log.read_text().splitlines(True) if x[-1:] == "\n"
        )

    def until(what: str) -> None:
        end = time.monotonic() + 300
        while not said(what):
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < end, what
            time.sleep(0.01)

    try:
        while not (run / "heartbeat_rank0.jsonl").exists():
            assert process.poll() is None, process.stderr and process.stderr.read()
            time.sleep(0.01)
        write_halt(run, HaltRequest("hold", "n1", "mine"))
        until("held")
        write_halt(run, HaltRequest("release", "n1", "mine"))
        until("released")
        write_halt(run, HaltRequest("halt", "n2", "mine"))
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.wait()
    assert json.loads((run / "exit.json").read_text())["status"] == "halted"


def test_its_plan_has_no_doubt_and_that_of_a_program_that_obeys_nothing_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UVCC_HOME", str(tmp_path / "home"))
    files = written(tmp_path)
    assert main(["plan", str(files["mine.yaml"])]) == 0
    said = capsys.readouterr().out
    assert "a halt     by the control file, drilled before the smoke" in said
    assert "note: nothing" not in said
    assert "looks at the control file" not in words_of_wizard(files["mine.yaml"])
    files["trainer.py"].write_text("print('hello')\n")
    assert main(["plan", str(files["mine.yaml"])]) == 0
    warning = "note: nothing in trainer.py looks at the control file"
    assert warning in (said := capsys.readouterr().out)
    assert "job.halt: sigterm drills it by SIGTERM alone" in said
    assert "nothing in trainer.py looks at the control file" in words_of_wizard(files["mine.yaml"])
    assert main(["plan", str(files["mine.yaml"]), "--set", "job.halt=sigterm"]) == 0
    assert "by SIGTERM alone: the program does not look" in (said := capsys.readouterr().out)
    assert warning not in said


def words_of_wizard(profile: Path) -> str:
    """What the start screen says of the profile, on one line."""
    lines = [plain(line).strip() for line in draft_lines(make_draft(str(profile), ()), 78, choose(True))]
    return re.sub(r"\s+", " ", " ".join(lines))


@pytest.mark.parametrize(
    ("files", "doubted"),
    [
        ({"train.py": "import torch"}, True),
        ({"train.py": "import mine", "mine.py": "from uvcc_engine.contract import RunWriter"}, False),
        ({"train.sh": 'tail "$UVCC_RUN_DIR/control.json"'}, False),
        ({"data.csv": "1,2"}, False),  # nothing that is a program: no opinion
    ],
)
def test_a_folder_that_is_uploaded_is_read_whole(files: dict[str, str], doubted: bool, tmp_path: Path) -> None:
    from uvcc_console.plan import code_tree

    for name, text in files.items():
        (tmp_path / name).write_text(text)
    job = CommandJobSettings(kind="command", argv=["python", "train.py"], steps=3, code=str(tmp_path))
    assert bool(command_halt.doubt(job, code_tree.survey(job))) == doubted


def test_programs_of_a_module_or_of_another_machine_are_given_no_opinion() -> None:
    for argv in (["python", "-m", "uvcc_engine.train"], ["/opt/there/train.py"], ["./train.bin"]):
        assert command_halt.doubt(CommandJobSettings(kind="command", argv=argv, steps=3)) == ""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_readmes_profile_is_drilled_and_runs_to_its_end(tmp_path: Path) -> None:
    profile = written(tmp_path)["mine.yaml"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("UVCC_")} | {"UVCC_HOME": str(tmp_path / "home")}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"

    def uvcc(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "uvcc_console.cli.main", *words]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, check=False)

    try:
        done = uvcc("rollout", str(profile), "--headless")
        assert done.returncode == 0, done.stdout + done.stderr
        told = uvcc("status", "last").stdout
        assert "gate     loss_falls: ok" in told
        assert "gate     halt_drill_s: ok" in told
        (tmp_path / "trainer.py").rename(tmp_path / "other.py")
        failed = uvcc("rollout", str(profile), "--headless")
        assert failed.returncode == 1
        assert "ended with exit code 2: " in failed.stdout, "and why it did, without a look elsewhere"
        assert "can't open file" in failed.stdout
    finally:
        uvcc("teardown", "last")
