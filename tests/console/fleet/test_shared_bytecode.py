"""A local pod's copy of the engine begins with what the installation has compiled of the same sources, and no other."""

from __future__ import annotations

import json
import os
import py_compile
import subprocess
import sys
from collections.abc import Callable
from importlib.util import cache_from_source
from pathlib import Path

import pytest

from uvcc_console.fleet import pod
from uvcc_console.fleet.local import localpod
from uvcc_console.fleet.wheel import build_wheel, engine_package
from uvcc_engine.contract.machine.compiled import BYTECODE_ENV

CODE = "WHERE = __file__\n\n\ndef where() -> str:\n    return where.__code__.co_filename\n"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A package with one compiled module, and one that nobody has imported."""
    package = tmp_path / "installed" / "things"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "1"\n')
    (package / "used.py").write_text(CODE)
    (package / "unused.py").write_text(CODE)
    py_compile.compile(str(package / "used.py"), doraise=True)
    return package


def _unpacked(installed: Path, **env: str) -> Path:
    """The package's copy on a pod."""
    wheel = build_wheel(installed.parent / "wheel", installed)
    site = installed.parent / "site"
    done = subprocess.run(
        [sys.executable, "-", str(wheel.path), wheel.sha256, str(site)],
        input=pod.source("unpack.py"),
        env={"PATH": os.environ["PATH"], **env},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"ok": True}
    return site / "things"


def _compiled(copy: Path) -> list[str]:
    return sorted(path.name.partition(".")[0] for path in copy.rglob("*.pyc"))


def test_the_copy_runs_what_was_compiled_as_its_own(installed: Path) -> None:
    copy = _unpacked(installed, **{BYTECODE_ENV: str(installed)})
    assert _compiled(copy) == ["used"]
    kept = Path(cache_from_source(str(copy / "used.py")))
    assert kept.read_bytes() == Path(cache_from_source(str(installed / "used.py"))).read_bytes()
    before = kept.stat()
    script = "from things import used; print(used.WHERE, used.where())"
    found = subprocess.run([sys.executable, "-c", script], cwd=copy.parent, capture_output=True, text=True, check=True)
    assert found.stdout.split() == [str(copy / "used.py")] * 2
    after = kept.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns), "it was compiled anew"


def _edit(source: Path) -> None:
    """Another source of the same length and time than what was compiled."""
    times = source.stat()
    built = source.read_text().replace("WHERE", "THERE")
    source.write_text(built)
    os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns))


def _touch(source: Path) -> None:
    os.utime(source, (1, 1))


def _let_anybody_write(source: Path) -> None:
    os.chmod(cache_from_source(str(source)), 0o666)


def _cut_off(source: Path) -> None:
    Path(cache_from_source(str(source))).write_bytes(b"12")


@pytest.mark.parametrize("change", [_touch, _let_anybody_write, _cut_off])
def test_what_does_not_fit_its_source_or_is_not_guarded_is_not_taken(
    installed: Path, change: Callable[[Path], None]
) -> None:
    change(installed / "used.py")
    assert _compiled(_unpacked(installed, **{BYTECODE_ENV: str(installed)})) == []


def test_another_source_is_compiled_on_the_pod(installed: Path) -> None:
    """The wheel was built before the installation changed."""
    wheel = build_wheel(installed.parent / "before", installed)
    _edit(installed / "used.py")
    py_compile.compile(str(installed / "used.py"), doraise=True)
    site = installed.parent / "site"
    env = {"PATH": os.environ["PATH"], BYTECODE_ENV: str(installed)}
    command = [sys.executable, "-", str(wheel.path), wheel.sha256, str(site)]
    subprocess.run(command, input=pod.source("unpack.py"), env=env, capture_output=True, check=True)
    assert "WHERE" in (site / "things" / "used.py").read_text()
    assert _compiled(site) == []


def test_elsewhere_pods_compile_for_themselves(installed: Path) -> None:
    assert _compiled(_unpacked(installed)) == []


def test_local_pods_are_told_of_the_installation(tmp_path: Path) -> None:
    assert localpod.environment(tmp_path)[BYTECODE_ENV] == str(engine_package())
