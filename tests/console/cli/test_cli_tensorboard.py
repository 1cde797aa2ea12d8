"""``uvcc tensorboard``: a real pod over SSH, its TensorBoard (a few lines that talk like it) seen through a forward."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from uvcc_console.core import events as ev
from uvcc_console.core import paths
from uvcc_console.core.journal.journal import Journal
from uvcc_console.fleet import procs, ssh_keys
from uvcc_console.fleet.local_provider import LocalProvider
from uvcc_console.fleet.provider import Pod, PodRequest
from uvcc_console.fleet.ssh import PodLink

RUN = "tb-run"
MAIN = b"""
import functools, http.server, os, sys
folder = sys.argv[sys.argv.index("--logdir") + 1]
assert os.environ["HOME"] in os.path.realpath(folder)
handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
    print("loading events", flush=True)
    print(f"TensorBoard 2.21.0 at http://127.0.0.1:{server.server_port}/ (Press CTRL+C to quit)", flush=True)
    server.serve_forever()
"""
CODE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs tests in the background has it ignored
from uvcc_console.cli.main import main
sys.exit(main())
"""
UVCC = [sys.executable, "-c", CODE]


async def _pod(folder: Path) -> tuple[Pod, str]:
    provider = LocalProvider(folder, ttl_s=3600.0)
    pod = await provider.wait_ready(await provider.create(PodRequest(f"tb-test-{os.getpid()}", 0, 0)))
    link = PodLink("p0r0", pod.address, ssh_keys.operator_key(folder))
    await link.sh(f"mkdir -p .uvcc/runs/{RUN}.full/tb tensorboard && touch tensorboard/__init__.py")
    await link.put(MAIN, "tensorboard/main.py")
    await link.put(b"events of the run", f".uvcc/runs/{RUN}.full/tb/events.out.tfevents.1")
    await link.put(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} -S -m agent --root x\n".encode(), ".uvcc/attach")
    await link.close()
    return pod, link.host_key


@pytest.fixture
def pod() -> Iterator[Pod]:
    folder = paths.run_dir(RUN)
    folder.mkdir(parents=True)
    made, host_key = asyncio.run(_pod(folder))
    journal = Journal(folder / "journal.sqlite", source="test")
    shape = {"replicas": 1, "pipeline_stages": 1, "tensor": 1}
    journal.append(
        ev.RunCreated(run=RUN, profile_name="t", job_kind="lm", stages=[], profile={}, **shape),
        ev.PodChanged(
            pod="p0r0", party=0, replica=0, provider="local", state="agent", address=made.address, host_key=host_key
        ),
        ev.PhaseStarted(phase="full", engine_run=f"{RUN}.full", steps=9, sid_job=""),
    )
    journal.close()
    yield made
    asyncio.run(LocalProvider(folder).delete(made))
    assert not procs.marked(made.provider_id)


def test_the_address_that_is_shown_leads_to_the_pod_until_interrupted(pod: Pod) -> None:
    verb = subprocess.Popen([*UVCC, "tensorboard", RUN], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    late = threading.Timer(120.0, verb.kill)
    late.start()
    try:
        assert verb.stdout is not None
        line = verb.stdout.readline()
        assert line.startswith("http://127.0.0.1:"), (line, verb.communicate()[1])
        with urllib.request.urlopen(f"{line.split()[0]}events.out.tfevents.1", timeout=120) as reply:
            assert reply.read() == b"events of the run"
        verb.send_signal(signal.SIGINT)
        assert verb.wait(120) == 0
    finally:
        late.cancel()
        verb.kill()
        verb.communicate()


def test_a_pod_without_its_files_says_so(pod: Pod) -> None:
    journal = Journal(paths.run_dir(RUN) / "journal.sqlite", source="test")
    journal.append(ev.PhaseStarted(phase="full", engine_run=f"{RUN}.other", steps=9, sid_job=""))
    journal.close()
    done = subprocess.run([*UVCC, "tensorboard", RUN], capture_output=True, text=True, timeout=500)
    assert done.returncode != 0
    assert "pod p0r0 has no TensorBoard files in .uvcc/runs/tb-run.other/tb" in done.stderr
    assert (
        subprocess.run([*UVCC, "tensorboard", RUN, "--pod", "p9r9"], capture_output=True, timeout=500).returncode == 2
    )
