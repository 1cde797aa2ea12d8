"""A pod whose disk became read-only leaves a worker no last words: it is asked for the reason."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import asyncssh
import pytest
from sshfake import QUICK, SshFake

from uvcc_console.fleet.ssh import PodLink
from uvcc_console.rollout.stages.training.dying_words import read_only

TOUCH = "touch: setting times of '.uvcc/runs/r.full'"


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (f"{TOUCH}: Read-only file system", "Read-only file system"),
        (f"{TOUCH}: Input/output error", "Input/output error"),
        ("touch: .uvcc/runs/r.full: read-only file system \x1b[2J", "Read-only file system"),
        (f"{TOUCH}: Permission denied", ""),
        ("\x00\xff" * 999, ""),
        (None, ""),  # as a real shell answers
    ],
)
async def test_a_pods_disk_that_takes_no_writes_is_named(
    tmp_path: Path, client_key: asyncssh.SSHKey, link_to: Callable[..., PodLink], said: str | None, why: str
) -> None:
    (tmp_path / ".uvcc/runs/r.full").mkdir(parents=True)
    before = (tmp_path / ".uvcc/runs/r.full").stat().st_mtime_ns

    async def answer(process: asyncssh.SSHServerProcess) -> None:
        found = (said or "").encode()
        if said is None:
            run = await asyncio.create_subprocess_shell(process.command or "", cwd=tmp_path, stdout=-1)
            found = (await run.communicate())[0]
        process.stdout.write(found)
        process.exit(0)

    host = await SshFake(client_key, answer).start()
    link = link_to(host.address, timeouts=QUICK)
    await link.connect()
    found = await read_only(link, "r.full")
    assert (found is None) == (not why)
    if found is not None:
        assert found[0] == f"the disk of pod {link.name} takes no writes ({why})"
        assert "uvcc pod RUN replace POD" in found[1]
    assert (tmp_path / ".uvcc/runs/r.full").stat().st_mtime_ns == before
    await host.stop()
