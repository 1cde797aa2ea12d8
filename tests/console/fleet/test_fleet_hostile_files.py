"""What a hostile pod can do to the operator's machine by what it offers: nothing beyond its own folder."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import stat
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import asyncssh
import pytest
from hostilepod import THERE, HostilePod, World
from sshfake import QUICK

from uvcc_console.core import events as ev
from uvcc_console.fleet.ssh import PodLink
from uvcc_console.rollout import actions
from uvcc_console.rollout.stages.verify import collect
from uvcc_engine.contract.errors import UnreachableError, UvccError, VerificationError

PRIVATE = {"job": {"kind": "private", "steps": 5}}
OUT = "transcript_p0r0s0t0/../../../../../.."  # from artifacts/full/p0r0 to the folder above the data folder
# for a file that gives nothing; an honest one beside it answers within this on a busy machine, too
SHORT = replace(QUICK, stall=5.0)


@pytest.fixture
async def pod(tmp_path: Path, client_key: asyncssh.SSHKey) -> AsyncIterator[HostilePod]:
    made = HostilePod(tmp_path / "pod", client_key)
    await made.ssh.start()
    yield made
    await made.ssh.stop()


@pytest.fixture
async def world(tmp_path: Path, pod: HostilePod, link_to: Callable[..., PodLink]) -> AsyncIterator[World]:
    made = World(tmp_path, link_to(pod.ssh.address, timeouts=QUICK), PRIVATE)
    yield made
    made.journal.close()


def everything_below(folder: Path, *, but: Path) -> set[str]:
    """Files of the operator's machine; the pod's own do not count."""
    files = {p.relative_to(folder) for p in folder.rglob("*") if p.is_file() and but not in p.parents}
    return {str(p) for p in files if p.parts[0] != "pod"}


async def test_no_name_leads_out_of_the_pods_folder(pod: HostilePod, world: World, tmp_path: Path) -> None:
    """The way in that was found: bashrc and authorized_keys, written over real SSH with the mode that the pod chose."""
    for victim in ("home/.bashrc", "home/.ssh/authorized_keys", "data/r/journal.sqlite"):
        path = pod.root / victim
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 100)
        path.chmod(0o777)
        pod.list(f"{OUT}/{victim}")
        pod.list(f"/{victim}")
    (tmp_path / "home/.ssh").mkdir(parents=True)
    before = everything_below(tmp_path, but=world.home)
    journal = world.run_dir / "journal.sqlite"
    inode = journal.stat().st_ino
    pod.put("events.jsonl", b"{}\n", mode=0o6777)
    assert await collect.fetch(world.ctx, world.phase, world.member) == 2
    assert everything_below(tmp_path, but=world.home) - before <= {"data/r/journal.sqlite-wal"}
    assert journal.stat().st_ino == inode
    assert (world.home / "events.jsonl").read_bytes() == b"{}\n"
    assert sorted(p.name for p in world.home.rglob("*") if p.is_file()) == ["SHA256SUMS", "events.jsonl", "run.info"]
    assert "6 names refused" in world.warnings()
    assert "leads out of its folder" in world.warnings()


async def test_the_pod_does_not_choose_modes_or_times(pod: HostilePod, world: World) -> None:
    pod.put("training.csv", b"step,loss\n", mode=0o4777)
    os.utime(pod.root / THERE / "training.csv", (0, 0))
    await collect.fetch(world.ctx, world.phase, world.member)
    found = (world.home / "training.csv").stat()
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert found.st_mtime > 1e9


async def test_a_refused_name_is_told_in_harmless_words_and_the_rest_is_fetched(pod: HostilePod, world: World) -> None:
    pod.put("transcript_p0r0s0t0/leaves.bin", b"leaves")
    for name in (
        "\x1b]0;owned\x07events.jsonl",
        "worker_\u202egol.exe.log",
        "EVENTS.jsonl",
        "events.jsonl",
        "a\\b.log",
    ):
        pod.list(name)
    pod.put("events.jsonl", b"{}\n")
    pod.lines.sort(key=lambda line: "EVENTS" in line)
    pod.lines[:] = [x for x in pod.lines if not (x.endswith("/events.jsonl") and x.startswith("100 "))]
    with pytest.raises(VerificationError):  # the first hash that was given for events.jsonl is not that of the file
        await collect.fetch(world.ctx, world.phase, world.member)
    assert (world.home / "transcript_p0r0s0t0/leaves.bin").read_bytes() == b"leaves"
    text = world.warnings()
    assert "control characters" in text
    assert "beyond ASCII" in text
    assert "given twice" in text
    assert text.isascii()
    assert text.isprintable()


async def test_a_pod_speaks_for_its_own_workers_only(pod: HostilePod, world: World) -> None:
    for coord in ("p0r0s0t0", "p1r0s0t0", "p00r0s0t0", "zzz"):
        pod.put(f"transcript_{coord}/leaves.bin", b"leaves")
        pod.put(f"result_{coord}.box", b"box")
    assert await collect.fetch(world.ctx, world.phase, world.member) == 3
    assert sorted(p.name for p in world.home.iterdir()) == [
        "SHA256SUMS",
        "result_p0r0s0t0.box",
        "run.info",
        "transcript_p0r0s0t0",
    ]
    assert "6 names refused" in world.warnings()
    assert "a worker that this pod does not run" in world.warnings()


@pytest.mark.parametrize(
    ("trick", "error", "words"),
    [
        ("endless", VerificationError, "more .*than the 100 bytes"),
        ("gives more", VerificationError, "more of .* than was asked for"),
        ("stalls", UnreachableError, "gives nothing of"),
    ],
)
async def test_what_streams_without_end_or_not_at_all_is_ended(
    pod: HostilePod, world: World, trick: str, error: type[UvccError], words: str
) -> None:
    pod.list("worker_p0r0s0t0.log")
    pod.tricks["worker_p0r0s0t0.log"] = trick
    world.member.link.timeouts = SHORT  # type: ignore[union-attr]
    pod.put("events.jsonl", b"{}\n")
    async with asyncio.timeout(120):
        with pytest.raises(error, match=words):
            await collect.fetch(world.ctx, world.phase, world.member)
    assert sorted(p.name for p in world.home.iterdir()) == ["events.jsonl", "run.info"]  # whole, or not there at all


async def test_a_server_that_gives_little_at_a_time_is_read_all_the_same(pod: HostilePod, world: World) -> None:
    pod.lines.clear()
    data = (pod.root / THERE / "run.info").read_bytes() * 20
    (pod.root / THERE / "run.info").write_bytes(data)
    pod.list("worker_p0r0s0t0.log", data[:100])
    pod.tricks["worker_p0r0s0t0.log"] = "dribbles"
    await actions.bring_files(world.member, THERE, _landing(world), {"p0r0s0t0"})
    assert (world.home / "worker_p0r0s0t0.log").read_bytes() == data[:100]


def _landing(world: World):  # type: ignore[no-untyped-def]
    from uvcc_console.fleet.download_folder import DownloadFolder

    return DownloadFolder(world.home)


async def test_pipes_devices_links_and_folders_are_no_evidence(pod: HostilePod, world: World) -> None:
    there = pod.root / THERE
    os.mkfifo(there / "worker_p0r0s0t0.log")
    (there / "val.csv").symlink_to("/dev/zero")
    (there / "metrics.json").symlink_to("run.info")
    (there / "exit.json").mkdir()
    for name in ("worker_p0r0s0t0.log", "val.csv", "metrics.json", "exit.json"):
        pod.list(name)
    pod.put("events.jsonl", b"{}\n")
    async with asyncio.timeout(120):
        with pytest.raises(VerificationError, match="no regular file"):
            await collect.fetch(world.ctx, world.phase, world.member)
    assert sorted(p.name for p in world.home.iterdir()) == ["events.jsonl", "run.info"]


async def test_a_link_in_our_own_folder_is_not_followed(pod: HostilePod, world: World, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    world.home.mkdir(parents=True)
    (world.home / "transcript_p0r0s0t0").symlink_to(victim)
    (victim / "events.jsonl").write_text("mine")
    (world.home / "events.jsonl").symlink_to(victim / "events.jsonl")
    pod.put("transcript_p0r0s0t0/leaves.bin", b"leaves")
    pod.put("events.jsonl", b"{}\n")
    with pytest.raises(VerificationError, match="a link or a file, not a folder"):
        await collect.fetch(world.ctx, world.phase, world.member)
    assert [p.name for p in victim.iterdir()] == ["events.jsonl"]
    assert (victim / "events.jsonl").read_text() == "mine"
    assert (world.home / "events.jsonl").read_bytes() == b"{}\n"
    assert not (world.home / "events.jsonl").is_symlink()


async def test_a_listing_without_end_ends(pod: HostilePod, world: World) -> None:
    pod.flood = True
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with asyncio.timeout(120):
        with pytest.raises(UvccError, match="sends more than 4194304 bytes"):
            await collect.fetch(world.ctx, world.phase, world.member)
        with pytest.raises(UvccError, match="sends more than 16777216 bytes"):
            await world.member.ssh.sh("anything")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 200 << 10  # KiB; both ends live in this process


async def test_more_than_the_disk_holds_is_refused_before_it_is_full(
    pod: HostilePod, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod.put("events.jsonl", b"{}\n")
    full = os.statvfs_result((4096, 4096, 100, 100, 100, 1, 1, 1, 0, 255))
    monkeypatch.setattr(os, "fstatvfs", lambda fd: full)
    with pytest.raises(UvccError, match=f"no room for .* are free at {re.escape(str(world.home.parent))}"):
        await collect.fetch(world.ctx, world.phase, world.member)
    assert list(world.home.iterdir()) == []


async def test_an_honest_pods_evidence_comes_home_beside_a_hostile_one(
    pod: HostilePod, world: World, tmp_path: Path, client_key: asyncssh.SSHKey, link_to: Callable[..., PodLink]
) -> None:
    others = []
    for name in ("p1r0", "p2r0"):
        other = HostilePod(tmp_path / name, client_key)
        await other.ssh.start()
        world.ctx.members[name].link = link_to(other.ssh.address, timeouts=QUICK)
        others.append(other)
    pod.flood = True
    with pytest.raises(UvccError, match="p0r0 sends more"):
        await collect.fetch_phase(world.ctx, world.phase)
    for name in ("p1r0", "p2r0"):
        assert (world.run_dir / f"artifacts/full/{name}/SHA256SUMS").exists()
    for other in others:
        await other.ssh.stop()


async def test_a_fetch_by_hand_is_as_careful(pod: HostilePod, world: World, tmp_path: Path) -> None:
    from uvcc_console.rollout.stage_runner import StageRunner

    world.bus.commit(
        ev.RunCreated(
            run="r",
            profile_name="t",
            job_kind="private",
            replicas=1,
            pipeline_stages=1,
            tensor=1,
            stages=["full"],
            profile=PRIVATE,
        ),
        ev.PhaseStarted(phase="full", engine_run="r.full", steps=5, sid_job=""),
    )
    (pod.root / "home").mkdir()
    (pod.root / "home/.bashrc").write_bytes(b"x" * 100)
    pod.list(f"{OUT}/home/.bashrc")
    before = everything_below(tmp_path, but=world.home)
    stages = StageRunner(world.bus, {}, frozenset(), 1.0)
    said = await actions.fetch(world.ctx, stages, {"pod": "p0r0"})
    assert said.startswith("1 file in artifacts/fetched/full-p0r0; 1 names refused: transcript_p0r0s0t0/..")
    grown = everything_below(tmp_path, but=world.home) - before
    assert {g for g in grown if "fetched" not in g and "journal" not in g} == set()


async def test_a_teardown_does_not_wait_for_a_pod_that_draws_it_out(
    pod: HostilePod, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.bus.commit(ev.StageChanged(name="full", status="running"))
    monkeypatch.setattr(collect, "LAST_S", 0.5)
    monkeypatch.setattr(collect, "started_phases", lambda ctx: [world.phase])
    pod.list("worker_p0r0s0t0.log")
    pod.tricks["worker_p0r0s0t0.log"] = "stalls"
    async with asyncio.timeout(120):
        await collect.last_words(world.ctx)
    assert "no evidence from p0r0: it takes longer" in world.warnings()
