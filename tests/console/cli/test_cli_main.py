"""The command itself: help, unknown words, exit codes, and what it does not import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from uvcc_console.cli.main import VERBS, main, module_of

HEAVY = ("torch", "textual", "asyncssh", "pydantic", "numpy", "yaml", "httpx")


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.parametrize("flag", [("--replicas", "2"), ("--data", "x.csv"), ("--model", "mlp"), ("--profile", "x")])
def test_the_language_models_demo_takes_nothing_of_the_private_one(
    flag: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--lm", *flag]) == 2
    assert f"--lm takes no {flag[0]}" in capsys.readouterr().err


def test_help_imports_nothing_heavy() -> None:
    code = f"""
import sys
from uvcc_console.cli.main import main
assert main(["--help"]) == 0
print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)
"""
    done = python(code)
    assert done.stderr.strip() == "[]"
    assert done.stdout.startswith("usage: uvcc")


@pytest.mark.parametrize("verb", ["runs", "status", "watch", "halt", "paths", "doctor", "verify"])
def test_reading_verbs_import_neither_torch_nor_textual(verb: str) -> None:
    done = python(
        f"import sys; from uvcc_console.cli.main import module_of; m = module_of({verb!r})\n"
        "try: m.run(['--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'textual') if m in sys.modules], file=sys.stderr)"
    )
    assert done.stderr.strip() == "[]", done.stderr


def _processor_s(*words: str) -> float:
    """The processor's time that a program takes: how busy the machine is does not count."""
    before = os.times()
    subprocess.run([sys.executable, *words], capture_output=True, check=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def test_help_is_instant() -> None:
    """It takes 0.1 s where Python takes as long to import two modules of its own; a slower processor lengthens both."""
    words, plain = ("-m", "uvcc_console.cli.main", "--help"), ("-c", "import argparse, asyncio")
    took, scale = (min(_processor_s(*program) for _ in range(5)) for program in (words, plain))
    assert took < max(0.3, 4 * scale)


def test_every_verb_has_a_module_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    listed = capsys.readouterr().out
    for verb in VERBS:
        module = module_of(verb)
        assert callable(module.run)
        assert f"  {verb} " in listed
        with pytest.raises(SystemExit) as left:
            main([verb, "--help"])
        assert left.value.code == 0
        assert f"uvcc {verb}" in capsys.readouterr().out


def test_an_unknown_verb_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stauts"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "did you mean status?" in said.err


def test_an_unknown_option_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--jsn"]) == 2
    assert "--jsn" in capsys.readouterr().err


def test_a_wrong_setting_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--set", "job.stepz=3", "--headless"]) == 2
    assert "job.stepz" in capsys.readouterr().err
    assert not (Path(os.environ["UVCC_HOME"]) / "runs").exists()


def test_a_home_that_cannot_be_written_is_a_clear_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def barred(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setenv("UVCC_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(Path, "mkdir", barred)
    assert main(["demo", "--headless"]) == 1
    said = capsys.readouterr().err
    assert "cannot create" in said
    assert "UVCC_HOME" in said


def test_doctor_tells_faults_by_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--json"]) == 0
    assert '"data folder"' in capsys.readouterr().out
    monkeypatch.setenv("UVCC_NOTIFY_COMMAND", "/no/such/program --loud")
    assert main(["doctor"]) == 0
    assert "! settings     notify_command: there is no program '/no/such/program'" in capsys.readouterr().out
    monkeypatch.setenv("UVCC_NOTIFY_COMMAND", "say it's")
    assert main(["doctor"]) == 0
    assert "is no command line" in capsys.readouterr().out
    assert main(["config"]) == 2
    assert capsys.readouterr().err.startswith("error: $UVCC_NOTIFY_COMMAND: ")
    monkeypatch.delenv("UVCC_NOTIFY_COMMAND")
    monkeypatch.setenv("UVCC_THEME", "nord")
    assert main(["doctor"]) == 0
    assert "+ settings" in capsys.readouterr().out
    monkeypatch.setenv("UVCC_THEME", "nrod")
    assert main(["doctor"]) == 0
    assert "! settings     there is no theme 'nrod', as $UVCC_THEME asks for" in capsys.readouterr().out
    monkeypatch.delenv("UVCC_THEME")
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("UVCC_HOME", str(blocked / "home"))
    assert main(["doctor"]) == 1
    assert "x data folder" in capsys.readouterr().out


def test_a_rollout_that_costs_money_asks_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = tmp_path / "paid.yaml"
    profile.write_text("job: {kind: command, argv: [x], steps: 1}\nfleet: {provider: prime}\nlimits: {hourly: 9}\n")
    monkeypatch.setattr(sys, "stdin", (tmp_path / "paid.yaml").open())
    assert main(["rollout", str(profile), "--headless"]) == 2
    assert "--yes" in capsys.readouterr().err
    assert not (Path(os.environ["UVCC_HOME"]) / "runs").exists()


def test_no_verb_writes_past_the_cleaning_functions() -> None:
    """What a verb shows goes through ``common`` (or a progress line that cleans): a later verb must not forget it."""
    import ast

    import uvcc_console.cli as cli

    own = {"main.py", "common.py", "console.py", "bench.py", "headless.py", "rollout.py", "tensorboard.py"}
    for path in sorted(Path(cli.__path__[0]).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called == "print" or called.endswith(("stdout.write", "stderr.write")):
                assert path.name in own, f"{path.name}: {called}"
