"""A rank that is forked ends as a program of its own would, and is ended as one."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from forked import ForkedRank, module

PATIENCE_S = 500.0


def rank(folder: Path, source: str, *arguments: str, **environment: str) -> ForkedRank:
    (folder / "main.py").write_text(source)
    return ForkedRank(environment, folder / "stderr", module(folder / "main.py", arguments))


@pytest.mark.parametrize(
    ("source", "code", "said"),
    [
        ("pass", 0, ""),
        ("import sys\nsys.exit(3)", 3, ""),
        ("import sys\nsys.exit('no data')", 1, "no data\n"),
        ("raise OSError('gone')", 1, "OSError: gone\n"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
    ],
)
def test_its_exit_code_and_last_words_are_a_programs(tmp_path: Path, source: str, code: int, said: str) -> None:
    one = rank(tmp_path, source)
    assert one.communicate(PATIENCE_S)[1].endswith(said)
    assert (one.returncode, one.poll(), one.wait()) == (code, code, code)


def test_it_has_the_environment_the_folder_and_the_arguments_that_it_was_given(tmp_path: Path) -> None:
    one = rank(tmp_path, "import os, sys\nsys.exit(repr((sys.argv[1:], os.getcwd(), dict(os.environ))))", "a", RANK="3")
    assert one.communicate(PATIENCE_S)[1] == f"{(['a'], os.getcwd(), {'RANK': '3'})!r}\n"


def test_one_that_goes_on_is_waited_for_in_vain_and_killed(tmp_path: Path) -> None:
    one = rank(tmp_path, "import signal\nwhile True:\n    signal.pause()")
    with pytest.raises(subprocess.TimeoutExpired):
        one.wait(0.01)
    assert one.poll() is None
    os.kill(one.pid, 0)
    one.kill()
    assert one.wait(PATIENCE_S) == -signal.SIGKILL
    one.send_signal(signal.SIGTERM)  # nobody's any more
