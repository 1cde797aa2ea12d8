"""A pytest plugin: the assertions of test files are rewritten once, before pytest's workers start.

Each of them would rewrite every file anew in a fresh checkout, all at the same time: fifteen processor seconds each.
What cannot be rewritten here, pytest's workers rewrite and report as ever.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

MANY = 20  # files, below which nobody waits for them
_config: pytest.Config


def stale(files: Iterator[Path]) -> list[Path]:
    """Those whose rewritten form is missing or older."""
    found = []
    for path in files:
        compiled = rewrite.get_cache_dir(path) / (path.stem + rewrite.PYC_TAIL)
        if not compiled.exists() or compiled.stat().st_mtime < path.stat().st_mtime:
            found.append(path)
    return found


def _rewrite(path: Path) -> None:
    with contextlib.suppress(SyntaxError, OSError):
        made, code = rewrite._rewrite_test(path, _config)
        folder = rewrite.get_cache_dir(path)
        folder.mkdir(exist_ok=True)
        state = _config.stash[rewrite.assertstate_key]
        rewrite._write_pyc(state, code, made, folder / (path.stem + rewrite.PYC_TAIL))


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        return
    asked = [Path(word.partition("::")[0]).absolute() for word in config.args]
    files = (path for folder in asked for path in ([folder] if folder.is_file() else folder.rglob("test_*.py")))
    found = stale(files)
    if len(found) < MANY:
        return
    global _config
    _config = config
    with multiprocessing.get_context("fork").Pool(min(os.cpu_count() or 1, 8)) as pool:
        pool.map(_rewrite, found, chunksize=8)
