"""The sidecar goes first where the system lets it, and what it starts does not."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

_ASK = """
import gc, json, os, subprocess, sys
from concurrent.futures import ThreadPoolExecutor
from uvcc_console.haltd.__main__ import first_in_line, precede
granted = first_in_line()
with ThreadPoolExecutor(1, initializer=precede) as pool:
    thread = pool.submit(os.sched_getscheduler, 0).result() & ~os.SCHED_RESET_ON_FORK
look = "import os; print(os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0))"
child = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True).stdout.split()
own = [os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK, os.getpriority(os.PRIO_PROCESS, 0)]
seen = [int(x) for x in child]
print(json.dumps({"granted": granted, "own": own, "thread": thread, "child": seen, "frozen": gc.get_freeze_count()}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="scheduling classes are Linux's")
def test_precedence_is_taken_where_allowed_and_not_passed_on() -> None:
    import os

    said = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, check=True).stdout
    found = json.loads(said.splitlines()[-1])
    assert found["frozen"] > 1000
    policy, nice = found["own"]
    assert {"real time": policy == os.SCHED_RR, "nice": nice < 0, "none": True}[found["granted"]]
    if found["granted"] == "real time":  # a conductor that the sidecar starts must not inherit it
        assert found["child"][0] == os.SCHED_OTHER
        assert found["thread"] == os.SCHED_RR
