"""Evidence outlives a power cut before it is believed, and before its pods go: then there is no other copy of it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import asyncssh
import pytest

from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import Journal
from uvcc_console.fleet.provider import Pod, Provider
from uvcc_console.plan.plan import make_plan
from uvcc_console.plan.profile import load
from uvcc_console.rollout import finish
from uvcc_console.rollout.bus import Bus
from uvcc_console.rollout.context import Member, Rollout
from uvcc_console.rollout.stages.verify import collect, verification
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.run_files import files


class Disk:
    """What is on it for good; ``broken``: it takes nothing more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.durable: set[int] = set()
        self.broken = False
        self._sync = os.fsync
        monkeypatch.setattr(os, "fsync", self._fsync)

    def _fsync(self, fd: int) -> None:
        if self.broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._sync(fd)
        self.durable.add(os.fstat(fd).st_ino)

    def lacks(self, root: Path) -> list[str]:
        found = [root, *root.rglob("*")]
        return [str(p) for p in found if not p.is_symlink() and p.stat().st_ino not in self.durable]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


class NoPods:
    """A provider whose pods are all gone; ``listed`` is called when it is asked, which is when they go."""

    name = "fake"

    def __init__(self) -> None:
        self.listed: list[list[str]] = []
        self.look: Any = list

    async def list(self, prefix: str) -> list[Pod]:
        self.listed.append(self.look())
        return []


@pytest.fixture
def ctx(tmp_path: Path) -> Iterator[Rollout]:
    _, profile = load("demo")
    plan = make_plan("demo-1", "demo", profile)
    journal = Journal(tmp_path / "journal.sqlite", source="test")
    journal.append(
        ev.RunCreated(
            run="demo-1",
            profile_name="demo",
            job_kind="private",
            replicas=1,
            pipeline_stages=1,
            tensor=1,
            stages=list(plan.stages),
        )
    )
    members = {name: Member(name, request) for name, request in plan.requests.items()}
    key = asyncssh.generate_private_key("ssh-ed25519")
    made = Rollout(plan, tmp_path, Bus(journal), cast(Provider, NoPods()), key, members)
    evidence = made.artifacts / "full" / "p0r0" / "transcript_p0r0s0t0"
    evidence.mkdir(parents=True)
    (evidence / "leaves.bin").write_bytes(b"leaves")
    (made.artifacts / "full" / "proof_bundle.json").write_text("{}")
    yield made
    journal.close()


def test_a_tree_is_durable_with_its_folders_and_an_error_names_the_file(ctx: Rollout, disk: Disk) -> None:
    os.mkfifo(ctx.artifacts / "pipe")
    (ctx.artifacts / "full" / "elsewhere").symlink_to("/nowhere")
    files.sync_tree(ctx.artifacts)
    os.unlink(ctx.artifacts / "pipe")
    assert disk.lacks(ctx.artifacts) == []
    disk.broken = True
    with pytest.raises(UvccError, match=r"cannot write .*/artifacts.*: Input/output error"):
        files.sync_tree(ctx.artifacts)
    files.sync_tree(ctx.artifacts / "not there")


async def test_what_is_collected_is_durable_when_the_stage_is_through(ctx: Rollout, disk: Disk) -> None:
    await collect.collect(ctx)
    assert disk.lacks(ctx.artifacts) == []
    disk.broken = True
    with pytest.raises(UvccError, match="Input/output error"):
        await collect.collect(ctx)


async def test_a_phase_is_called_verified_when_its_evidence_is_durable(
    ctx: Rollout, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fetched(ctx: Rollout, phase: Any) -> int:
        return 0

    sound = {"epochs": 1, "leaves": 1, "global_root": "ab", "sid_job": "cd", "run_root": "", "level": "bundle"}
    certificate = SimpleNamespace(**sound, values={}, result_hashes=["ef"])
    monkeypatch.setattr(verification, "fetch_phase", fetched)
    monkeypatch.setattr(verification, "assemble_folder", lambda folder: folder / "proof_bundle.json")
    monkeypatch.setattr(verification, "verify", lambda path, **more: certificate)
    phase, disk.broken = ctx.plan.phases["full"], True
    with pytest.raises(UvccError, match="Input/output error"):
        await verification.verify_phase(ctx, phase)
    assert "full" not in ctx.bus.snapshot.verdicts
    disk.broken = False
    await verification.verify_phase(ctx, phase)
    assert disk.lacks(ctx.artifacts) == []
    assert ctx.bus.snapshot.verdicts["full"].ok


@pytest.mark.parametrize("broken", [False, True])
async def test_what_came_home_is_durable_before_the_pods_of_a_failed_run_go(
    ctx: Rollout, disk: Disk, broken: bool
) -> None:
    provider = cast(NoPods, ctx.provider)
    provider.look = lambda: disk.lacks(ctx.artifacts)
    disk.broken = broken
    assert await finish.finish(ctx, "failed", "why") == ("failed", "why")
    assert provider.listed
    told = [a for a in ctx.bus.snapshot.alerts if "a power cut may still take the evidence" in a.text]
    assert bool(provider.listed[0]) == bool(told) == broken  # a delay, never an obstacle
