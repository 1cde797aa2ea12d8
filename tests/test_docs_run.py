"""What the manual's tutorials say is typed and shown: every block marked so is run in a sandbox.

``<!-- file: NAME -->`` before a fenced block writes it there; ``<!-- run -->`` before a ``console`` block runs what
follows ``$``, and the lines below it must be found in the output, in order: numbers, hashes and run ids may differ, and
output may have lines between them. Blocks marked ``<!-- run slow -->`` are run in the slow tests only. A page that says
``<!-- given: a finished run -->`` finds a rehearsed run in its data folder, and the keys to expect in ``keys``.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent / "console" / "report"))
import package_run

ROOT: Final = Path(__file__).parents[1]
DOCS: Final = ROOT / "docs"
BLOCK: Final = re.compile(r"^<!-- (file: [\w.-]+|run|run slow) -->\n```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PATIENCE_S: Final = 600.0
VARIES: Final = (
    (r"\b\w+-\d{8}-\d{4}-[0-9a-f]{4}\b", r"[\\w-]+-\\d{8}-\\d{4}-[0-9a-f]{4}"),  # a run's id
    (r"\b[0-9a-f]{12,}\b", "[0-9a-f]+"),
    (r"\d+(\.\d+)?", r"[-+\\d.,e]+"),
)


class Block(NamedTuple):
    """A marked block: ``mark`` is ``file: NAME``, ``run`` or ``run slow``."""

    mark: str
    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    return [Block(*found) for found in BLOCK.findall(page.read_text(encoding="utf-8"))]


STORIES: Final = {
    "auditor": pytest.mark.ci("tests/console/report/test_archive.py"),
    "notebook": pytest.mark.ci("tests/engine/private/test_simulate.py"),
    "own-layer": pytest.mark.ci("tests/engine/parallel/test_layer_from_outside.py"),
    "watch-any-trainer": pytest.mark.ci("tests/console/follow/test_adopted.py"),
    "write-a-protocol": pytest.mark.ci("tests/engine/mpc/test_mpc_protocols.py"),
    "adopt-hosts": pytest.mark.ci("tests/console/fleet/test_fleet_inventory.py"),
}
"""Pages whose commands take many seconds: packages, trainings, whole runs."""
PAGES: Final = [p for p in sorted(DOCS.rglob("*.md")) if any(b.mark.startswith("run") for b in blocks(p))]


def shape(line: str) -> re.Pattern[str]:
    """What a line of output may look like: as it stands, with other numbers, hashes and ids, and anything behind it."""
    pattern, rest = "", line.rstrip()
    while rest:
        found = [(m, by) for regex, by in VARIES if (m := re.search(regex, rest))]
        if not found:
            return re.compile(pattern + re.escape(rest))
        m, by = min(found, key=lambda f: f[0].start())
        pattern += re.escape(rest[: m.start()]) + by.replace("\\\\", "\\")
        rest = rest[m.end() :]
    return re.compile(pattern)


def commands(block: Block) -> Iterator[tuple[str, list[str]]]:
    """Each command with the lines that its output must have."""
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, wanted = part.partition("\n")
        yield command, [line for line in wanted.splitlines() if line.strip()]


def a_finished_run(folder: Path) -> None:
    """The run that the tests of reports look at, in the data folder of the commands, and an auditor's keys."""
    run_dir = package_run.make_home(folder / "home")
    signers = package_run.pins_of(run_dir).read_text(encoding="utf-8")
    (folder / "keys").write_text(re.sub(r' namespaces="[^"]*"', "", signers), encoding="utf-8")


def play(page: Path, folder: Path, *, slow: bool, programs: Path = Path(sys.executable).parent) -> int:
    """Run a page's blocks in ``folder`` with the commands in ``programs``; returns how many commands were run.

    What they started ends with them.
    """
    if "<!-- given: a finished run -->" in page.read_text(encoding="utf-8"):
        a_finished_run(folder)
    try:
        return _play(page, folder, programs, slow=slow)
    finally:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):  # ended meanwhile, or not ours
                if process.environ().get("HOME") == str(folder):
                    process.kill()


def environment(folder: Path) -> dict[str, str]:
    """What a newcomer has: nothing of this program, nor of the environment that runs the tests."""
    here = {str(Path(sys.executable).parent), str(Path(sys.prefix) / "bin")}
    env = {k: v for k, v in os.environ.items() if not k.startswith(("UVCC_", "COV_", "VIRTUAL_ENV", "PYTHON"))}
    path = os.pathsep.join(p for p in env.get("PATH", os.defpath).split(os.pathsep) if p not in here)
    return env | {"HOME": str(folder), "PATH": path, "TERM": "dumb", "LANG": "C.UTF-8"}


def _play(page: Path, folder: Path, programs: Path, *, slow: bool) -> int:
    env = environment(folder)
    env |= {"UVCC_HOME": str(folder / "home"), "PATH": f"{programs}{os.pathsep}{env['PATH']}"}
    done = 0
    for block in blocks(page):
        if block.mark.startswith("file: "):
            (folder / block.mark.removeprefix("file: ")).write_text(block.text, encoding="utf-8")
        elif block.mark == "run" or slow:
            for command, wanted in commands(block):
                ran = subprocess.run(
                    command,
                    shell=True,
                    cwd=folder,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    timeout=PATIENCE_S,
                )
                output = ran.stdout
                assert ran.returncode == 0, f"$ {command}\n{output}"
                lines = iter(output.splitlines())
                for line in wanted:
                    assert any(shape(line).search(said) for said in lines), f"$ {command}\nno {line!r} in\n{output}"
                done += 1
    return done


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=STORIES.get(p.stem, ())) for p in PAGES if any(b.mark == "run" for b in blocks(p))],
    ids=lambda p: p.relative_to(DOCS).as_posix(),
)
def test_what_a_page_shows_happens(page: Path, tmp_path: Path) -> None:
    assert play(page, tmp_path, slow=False) > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page",
    [p for p in PAGES if any(b.mark == "run slow" for b in blocks(p))],
    ids=lambda p: p.relative_to(DOCS).as_posix(),
)
def test_a_whole_tutorial_is_followed_literally(page: Path, tmp_path: Path) -> None:
    assert play(page, tmp_path, slow=True) > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_newcomer_installs_it_in_a_fresh_clone_and_follows_the_first_page(tmp_path: Path) -> None:
    """The page's own lines of installation, then everything that it shows, with nothing else at hand."""
    page, clone = DOCS / "tutorials" / "first-run.md", tmp_path / "clone"
    installing = re.search(r"^```sh\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert installing is not None
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    env = environment(tmp_path)
    lines = f"set -e\n{installing[1]}command -v uvcc\n"
    done = subprocess.run(["sh", "-c", lines], cwd=clone, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    programs = clone / ".venv" / "bin"
    assert done.stdout.splitlines()[-1] == str(programs / "uvcc")
    assert play(page, tmp_path, slow=True, programs=programs) > 3


def test_other_numbers_fit_and_other_words_do_not() -> None:
    assert shape("demo-20260101-0000-abcd: ok, verified").search("demo-20261122-1803-1a00: ok, verified")
    assert shape("VERIFIED     phase full: 61 epochs").search("VERIFIED     phase full: 7 epochs, 12 leaves")
    assert not shape("VERIFIED     phase full: 61 epochs").search("NOT VERIFIED phase full: 7 epochs")
    assert not shape("gate     loss_falls: ok").search("gate     loss_falls: failed")
