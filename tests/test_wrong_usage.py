"""Whatever has options tells wrong usage in one line, however it is started. argparse would show its whole usage."""

from __future__ import annotations

import ast
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from parsed import ALONE, EVERY_SOURCE, ROOT, SOURCES, nodes_of

MODULES = [
    *("uvcc_console.haltd", "uvcc_console.rollout.conductor", "uvcc_console.follow.adopted"),
    *("uvcc_console.fleet.local.localpod", "uvcc_engine.relay", "uvcc_engine.transcript.proof.cli"),
    *("uvcc_engine.bench.mpc", "uvcc_engine.bench.epochs", "uvcc_engine.bench.tabular", "uvcc_engine.bench.transcript"),
    *("uvcc_engine.nsa.selftest", "uvcc_engine.owner.accuracy", "uvcc_engine.bench.threads"),
]
ATTACH = "uvcc_engine.agent.attach"  # whose errors are JSON
TELLING = ("uvcc_engine.cli", "uvcc_console.cli.main")  # where every command's errors are told


def called(node: ast.AST) -> str:
    """What is called, as it is written."""
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def test_no_module_takes_argparse_as_it_is() -> None:
    plain = [path for path in SOURCES if any(called(node).endswith("ArgumentParser") for node in nodes_of(path))]
    assert plain == []


def test_every_module_that_is_started_by_itself_and_has_options_is_tried_here() -> None:
    """A command's own modules are started by ``uvcc`` and ``uvcc-engine``, which tell errors themselves."""
    for path in SOURCES:
        started = any(isinstance(n, ast.If) and ast.unparse(n.test) == "__name__ == '__main__'" for n in nodes_of(path))
        if started and any(called(node).endswith(("RaisingParser", "conducting.main")) for node in nodes_of(path)):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
            assert name in [*MODULES, ATTACH, *TELLING], path


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("module", MODULES)
def test_a_module_started_by_itself_tells_wrong_usage_in_one_line(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [module, "--no-such-option"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (2, "")
    assert said.err.startswith("error: ")
    assert said.err.endswith("--help)\n")
    assert said.err.count("\n") == 1


def test_the_bridge_tells_it_as_it_tells_every_error(capsys: pytest.CaptureFixture[str]) -> None:
    from uvcc_engine.agent import attach

    assert attach.main(["--roof", "pod"]) == 2
    told = json.loads(capsys.readouterr().err)
    assert told == {"op": "error", "error": "unknown option '--roof'", "hint": told["hint"]}
    assert told["hint"].startswith("did you mean --root?")


def test_the_verifier_that_stands_alone_tells_it_in_one_line(tmp_path: Path) -> None:
    (path,) = (path for path in EVERY_SOURCE if path.name == ALONE)
    done = subprocess.run([sys.executable, "-I", str(path), "--polizy"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: unrecognized arguments: --polizy (see: {ALONE} --help)\n"
