"""Verbs that only read load nothing that logs in or draws: they answer at once, also on a busy machine."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

HEAVY = ("asyncssh", "cryptography", "httpx", "textual", "torch", "numpy")


@pytest.mark.parametrize("verb", ["status", "runs", "pods"])
def test_reading_verbs_load_no_network(tmp_path: Path, verb: str) -> None:
    code = (
        "import sys\n"
        "from uvcc_console.cli.main import main\n"
        f"code = main([{verb!r}])\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)\n"
    )
    with tempfile.TemporaryDirectory(prefix="uk", dir="/tmp") as own:  # no local pods of others lie there
        env = {**os.environ, "UVCC_HOME": str(tmp_path), "TMPDIR": own}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[]", done.stderr
