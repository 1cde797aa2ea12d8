"""What the project promises about itself: import contracts, light start-up, no machine paths."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest
from parsed import EVERY_SOURCE, ROOT, nodes_of, text_of


def _modules_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint('\\n'.join(m.split('.')[0] for m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module", ["uvcc_console.cli.main", "uvcc_console.core.journal.journal", "uvcc_engine.contract.agent_protocol.wire"]
)
def test_light_imports(module: str) -> None:
    loaded = _modules_after(f"import {module}")
    assert not loaded & {"torch", "textual", "numpy", "asyncssh"}


def test_uvcc_help_loads_neither_torch_nor_textual() -> None:
    loaded = _modules_after(
        "from uvcc_console.cli.main import main\nimport contextlib, io\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    try: main(['--help'])\n    except SystemExit: pass"
    )
    assert not loaded & {"torch", "textual"}


def test_importing_the_ui_does_not_load_torch() -> None:
    loaded = _modules_after("import uvcc_console.ui.app")
    assert "textual" in loaded
    assert "torch" not in loaded


def test_no_path_of_a_machine_in_tracked_files() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    bad = re.compile(re.escape(f"{ROOT}/") + r"|index-url|--registry")
    found = []
    for name in tracked.stdout.split():
        path = ROOT / name
        if name == "tests/test_hygiene.py" or path.suffix in {".npz", ".png"} or not path.is_file():
            continue
        if bad.search(path.read_text("utf-8", errors="replace")):
            found.append(name)
    assert found == []


def test_nothing_lies_beside_the_rooms() -> None:
    """What a run leaves where it was started, a bundle say, is not committed with what was changed."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    rooms = {"uvcc_console", "uvcc_engine", "profiles", "tests", "docs", ".ci"}
    papers = {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE"}
    settings = {"pyproject.toml", "mkdocs.yml", ".gitignore"}
    found = {name.split("/")[0] for name in tracked.stdout.split()}
    assert found - rooms - papers - settings == set()


def test_the_manual_promises_no_more_than_the_policy_states() -> None:
    """Who operates a run is signed in every policy; the sentences about privacy must say the same."""
    from uvcc_engine.contract.job.topology import Topology
    from uvcc_engine.transcript.terms.operation import ONE_OPERATOR, SEALED, Operation

    pages = [ROOT / "README.md", ROOT / "docs" / "security" / "index.md"]
    text = " ".join(" ".join(page.read_text() for page in pages).split())
    stated = Operation.of(Topology(replicas=2))
    assert ("One operator runs everything and could look" in text) == (stated.operators == ONE_OPERATOR)
    assert ("and so is traffic between a party's own pods" in text) == (stated.party_traffic == SEALED)
    assert "not the operator" not in text
    assert "remove that trust" not in text


def test_no_part_of_the_console_writes_to_standard_error_by_itself() -> None:
    """What happens unseen is logged, so that ``uvcc logs`` shows it; only the verbs speak to a terminal."""
    found = []
    for path in sorted((ROOT / "uvcc_console").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith("uvcc_console/cli/"):
            continue
        if not re.search(r"__stderr__|stderr|traceback\.print_|logging\.warning", text_of(path)):
            continue
        for node in nodes_of(path):
            text = ast.unparse(node) if isinstance(node, ast.Call) else ""
            bare = text.startswith(
                ("sys.stderr.write(", "sys.__stderr__.write(", "traceback.print_", "logging.warning(")
            )
            if bare or (text.startswith("print(") and "stderr" in text):
                found.append(f"{name}:{node.lineno}")
    assert found == []


def test_no_source_file_is_longer_than_450_lines() -> None:
    """A file has one purpose; one that grows beyond this has found a second.

    The standalone verifier is handed over as one file, on purpose; a test of its own bounds it.
    """
    alone = ROOT / "uvcc_engine/transcript/proof/standalone_verify.py"
    assert alone in EVERY_SOURCE
    sources = [p for p in EVERY_SOURCE if p != alone]
    long = {p.relative_to(ROOT).as_posix(): n for p in sources if (n := len(text_of(p).splitlines())) > 450}
    assert long == {}


def test_no_source_refers_to_documents_that_are_not_here() -> None:
    """What a reader needs to know stands in the repository: docs/architecture.md and the docstrings."""
    away = re.compile(r"DESIGN(\.md| section| §)|seed document|seeds' name|of the seeds\b")
    found = [p.relative_to(ROOT).as_posix() for p in EVERY_SOURCE if away.search(text_of(p))]
    assert found == []
