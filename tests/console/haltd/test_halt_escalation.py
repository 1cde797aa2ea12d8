"""A frozen pod, a dead link, a server that is gone: each is UNKNOWN in time, then the armed policy ends the pod."""

from __future__ import annotations

import asyncio
import os
import signal

import psutil
import pytest

from uvcc_console.bench import halts
from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import read_all
from uvcc_console.fleet import procs
from uvcc_console.halt.machine import Times
from uvcc_console.haltd.service import Service

# honest pods halt within it on a busy machine; the lost one is given up on each rung
QUICK = Times(commit=0.3, hold=10.0, halt=10.0, term=2.0, kill=2.0, terminate=120.0)
ARMED = ["hold", "halt", "term", "kill", "terminate"]


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["pod", "link", "server"])
async def test_unknown_then_terminated_by_policy(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(halts.PROFILE, "halt", {"lease": 0.0, "auto": ARMED})
    monkeypatch.setitem(halts.PROFILE, "fleet", {"provider": "local"})
    async with halts.fleet(3) as found:
        await found.launch("halts.full")
        service = asyncio.create_task(Service(found.run_dir, times=QUICK).run())
        stopped: list[int] = []
        try:
            await found.verdict((await found.ask("hold", drill=True))[0])
            pod = next(p for p in found.pods if p.name == "uvcc-halts-p1r0")
            for pid in procs.marked(pod.provider_id):
                try:
                    carries = "uvcc_console.fleet.local.localpod" in psutil.Process(pid).cmdline()
                except psutil.Error:  # it went with the server
                    continue
                if lost == "pod" or carries:  # the link is what carries it: the SSH server alone
                    os.kill(pid, signal.SIGKILL if lost == "server" else signal.SIGSTOP)
                    stopped.append(pid)
            assert stopped
            nonce, _ = await found.ask("halt")
            done = await found.verdict(nonce)
        finally:
            for pid in stopped:
                if procs.identify(pid) is not None:
                    os.kill(pid, signal.SIGCONT)
            service.cancel()
            await asyncio.gather(service, return_exceptions=True)
        acks = [
            e for _, e in found.journal.since(0, kinds=("halt_ack",)) if isinstance(e, ev.HaltAck) and e.nonce == nonce
        ]
        stages = [a.stage for a in acks if a.pod == "p1r0"]
        assert "unknown" in stages
        assert [(a.stage, a.path) for a in acks if a.pod == "p1r0"][-1] == ("gone", "api")
        assert stages.index("unknown") < stages.index("gone")
        assert done.total == 3
        assert {read_all(found.journal).halt.acks[p][0] for p in ("p0r0", "p2r0")} == {"gone"}
        assert not procs.marked(pod.provider_id)
        assert {p: v.state for p, v in read_all(found.journal).pods.items()} == {
            "p0r0": "agent", "p1r0": "gone", "p2r0": "agent"
        }  # fmt: skip
