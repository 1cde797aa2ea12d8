"""Checkpoints come home part by part, verified, and go back onto a pod that replaces a lost one."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import shutil
import struct
import subprocess
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from test_rollout_actions import World

from uvcc_console.core import events as ev
from uvcc_console.core.journal.journal import iter_events
from uvcc_console.fleet.ssh import Completed
from uvcc_console.plan.plan import FULL
from uvcc_console.rollout.stages.fleet import preflight, replacing
from uvcc_console.rollout.stages.migration import checkpoint_copies, earlier_checkpoint, lm_migration
from uvcc_engine.contract.checkpoints import checkpoint
from uvcc_engine.contract.checkpoints.tensors import check_tensors
from uvcc_engine.contract.errors import ConfigError, UnreachableError, UvccError, VerificationError
from uvcc_engine.contract.parsing.canonical import sorted_json

RUN = "r.full"


def tensors(fill: int, count: int = 300_000) -> bytes:
    header = json.dumps({"w": {"dtype": "U8", "shape": [count], "data_offsets": [0, count]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes([fill]) * count


class PodShell:
    """A pod's link that is a folder of this machine: its commands run in a real shell there."""

    up = True

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cut_after = math.inf  # bytes, then the link is lost
        self.changes = ""  # a byte of this file changes on its way, once
        self.sent = 0

    @property
    def checkpoints(self) -> Path:
        return self.root / f".uvcc/runs/{RUN}/checkpoints"

    def save(self, step: int, fill: int, **more: bytes) -> checkpoint.CheckpointManifest:
        contents = {"rank0.safetensors": tensors(fill), **more}
        return checkpoint.save(self.checkpoints, run=RUN, step=step, topology={"replicas": 1}, contents=contents)

    async def run(self, command: str) -> Completed:
        done = subprocess.run(["sh", "-c", command], cwd=self.root, capture_output=True)
        return Completed(done.returncode, done.stdout, done.stderr)

    async def sh(self, command: str, *, timeout: float = 0.0) -> str:
        done = await self.run(command)
        assert done.exit == 0, done
        return done.text

    async def read_part(self, remote: str, offset: int, size: int) -> bytes:
        if self.sent >= self.cut_after:
            raise UnreachableError("the link is lost")
        try:
            with (self.root / remote).open("rb") as f:
                f.seek(offset)
                data = f.read(size)
        except OSError as e:
            raise UvccError(str(e)) from e
        self.sent += len(data)
        if self.changes and remote.endswith(self.changes):
            self.changes = ""
            return data[:-1] + bytes([data[-1] ^ 1])
        return data

    async def put(self, data: Path | bytes, remote: str, *, mode: int = 0o600, timeout: float = 0.0) -> None:
        (self.root / remote).write_bytes(data if isinstance(data, bytes) else data.read_bytes())


class Home:
    def __init__(self, world: World, pod: PodShell) -> None:
        self.world, self.ctx, self.pod = world, world.ctx, pod
        self.phase = world.ctx.plan.phases[FULL]
        self.member = world.ctx.members["p0r0"]
        self.member.link = cast(Any, pod)

    @property
    def root(self) -> Path:
        return checkpoint_copies.folder_of(self.ctx, self.phase, "p0r0")

    def written(self, manifest: checkpoint.CheckpointManifest) -> None:
        fields = {"step": manifest.step, "sha256": manifest.sha256}
        event = ev.EngineEvent(pod="p0r0", level="info", event="checkpoint_written", fields=fields)
        self.world.bus.commit(event)

    async def bring(self, manifest: checkpoint.CheckpointManifest, rate: float = math.inf, keep: int = 2) -> None:
        step, sha256 = manifest.step, manifest.sha256
        await checkpoint_copies.bring_home(self.ctx, self.phase, self.member, step, sha256, keep=keep, rate=rate)


@pytest.fixture
async def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Home]:
    (tmp_path / "pod").mkdir()
    monkeypatch.setattr(checkpoint_copies, "PART", 1 << 16)
    world = World(tmp_path)
    yield Home(world, PodShell(tmp_path / "pod"))
    world.journal.close()


async def test_each_newest_checkpoint_comes_home_and_the_older_ones_go(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_copies, "LOOK_S", 0.005)
    keeping = asyncio.create_task(checkpoint_copies.keep_home(home.ctx))
    try:
        for n in range(1, 4):
            home.written(home.pod.save(10 * n, n))
            await home.world.bus.wait(lambda s, n=n: s.home.get("p0r0", (0, ""))[0] == 10 * n, 120.0)
    finally:
        keeping.cancel()
    assert checkpoint.steps_present(home.root) == [30, 20]
    assert checkpoint.verify_step(home.root, 30, run=RUN).sha256 == home.world.bus.snapshot.home["p0r0"][1]
    told = [e for _, e in iter_events(home.ctx.run_dir / "journal.sqlite") if isinstance(e, ev.CheckpointHome)]
    assert [(e.step, e.path) for e in told][-1] == (30, "artifacts/full/p0r0/checkpoints/step-30")
    assert told[-1].bytes > 300_000


async def test_a_lost_link_costs_only_what_was_under_way(home: Home) -> None:
    made = home.pod.save(10, 7)
    home.pod.cut_after = 200_000
    with pytest.raises(UnreachableError):
        await home.bring(made)
    assert checkpoint.steps_present(home.root) == []  # nothing half counts as home
    arrived = home.pod.sent
    home.pod.cut_after, home.pod.sent = math.inf, 0
    await home.bring(made)
    assert checkpoint.verify(home.root / "step-10").sha256 == made.sha256
    whole = len(tensors(7)) + (home.root / "step-10" / checkpoint.MANIFEST).stat().st_size
    assert home.pod.sent < whole - arrived + 2 * (1 << 16) + 2000
    await home.bring(made)
    assert checkpoint.steps_present(home.root) == [10]


@pytest.mark.parametrize(
    ("changed", "words"), [("rank0.safetensors", "was altered"), (checkpoint.MANIFEST, "is damaged")]
)
async def test_what_changes_on_the_way_is_not_home_and_comes_again(
    home: Home, monkeypatch: pytest.MonkeyPatch, changed: str, words: str
) -> None:
    """Each checkpoint is read and checked when it arrives: nothing damaged stands under a checkpoint's name."""
    monkeypatch.setattr(checkpoint_copies, "LOOK_S", 0.005)
    monkeypatch.setattr(checkpoint_copies, "AGAIN_S", 0.005)
    home.pod.changes = changed
    made = home.pod.save(10, 7)
    home.written(made)
    keeping = asyncio.create_task(checkpoint_copies.keep_home(home.ctx))
    try:
        await home.world.bus.wait(lambda s: "p0r0" in s.home, 120.0)
    finally:
        keeping.cancel()
    told = [e for _, e in iter_events(home.ctx.run_dir / "journal.sqlite")]
    refused = [at for at, e in enumerate(told) if isinstance(e, ev.Alert) and e.name == "checkpoint_home"]
    (arrived,) = (at for at, e in enumerate(told) if isinstance(e, ev.CheckpointHome))
    assert refused == [arrived - 1]
    alert = told[refused[0]]
    assert isinstance(alert, ev.Alert)
    assert "the checkpoint of step 10 is not home" in alert.text
    assert words in alert.text
    assert checkpoint.verify_step(home.root, 10, run=RUN).sha256 == made.sha256


async def test_the_profile_bounds_the_bandwidth(home: Home) -> None:
    made = home.pod.save(10, 7)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await home.bring(made, rate=1_000_000)
    assert loop.time() - began > 0.2  # 300 kB, the last part without a pause


def hostile(home: Home, change: Any) -> str:
    """A manifest that the pod wrote to harm, with sums that hold."""
    made = home.pod.save(10, 7)
    path = made.path / checkpoint.MANIFEST
    body = json.loads(path.read_bytes())["body"]
    change(body)
    whole = {"body": body, "body_sha256": checkpoint.sha256_of(sorted_json(body).encode())}
    path.write_bytes(sorted_json(whole).encode())
    return hashlib.sha256((made.path / checkpoint.MANIFEST).read_bytes()).hexdigest()


def _rename(body: dict[str, Any]) -> None:
    files = body["ranks"]["0"]["files"]
    files["../../../../../../x"] = files.pop("rank0.safetensors")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_rename, "is damaged"),
        (lambda b: b["ranks"]["0"]["files"]["rank0.safetensors"].update(bytes=-1), "is damaged"),
        (lambda b: b["ranks"]["0"]["files"]["rank0.safetensors"].update(bytes=1 << 60), "does not fit here"),
        (lambda b: b["ranks"]["0"]["files"]["rank0.safetensors"].update(sha256="ab" * 32), "was altered"),
        (lambda b: b["ranks"]["0"].update(files=[1]), "is damaged"),
        (lambda b: b.update(step=11), "another checkpoint of step 10"),
        (lambda b: b.update(run="other"), "another checkpoint of step 10"),
    ],
)
async def test_what_a_pod_says_of_its_checkpoint_is_checked(home: Home, change: Any, words: str) -> None:
    sha256 = hostile(home, change)
    with pytest.raises(UvccError, match=words):
        await checkpoint_copies.bring_home(home.ctx, home.phase, home.member, 10, sha256, keep=2, rate=math.inf)
    assert checkpoint.steps_present(home.root) == []


async def test_bytes_that_would_not_load_are_not_home(home: Home) -> None:
    made = checkpoint.save(
        home.pod.checkpoints, run=RUN, step=10, topology={}, contents={"rank0.safetensors": b"\x08" + bytes(20)}
    )
    with pytest.raises(VerificationError, match="would not load"):
        await home.bring(made)
    assert home.world.bus.snapshot.home == {}


async def test_a_checkpoint_deleted_meanwhile_is_no_error(home: Home) -> None:
    made = home.pod.save(10, 7)
    shutil.rmtree(made.path)
    await home.bring(made)
    assert home.world.bus.snapshot.home == {}


async def test_a_replaced_pod_gets_the_newest_from_home(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home.pod.root / f".uvcc/runs/{RUN}").mkdir(parents=True)
    (home.pod.root / f".uvcc/runs/{RUN}/training.csv").write_text("step,loss\n10,0.5\n")
    made = home.pod.save(10, 7)
    home.written(made)
    await home.bring(made)
    other = PodShell(tmp_path / "other")
    other.root.mkdir()

    async def replaced(ctx: Any, name: str) -> str:
        ctx.members[name].link = cast(Any, other)
        return name

    async def fine(ctx: Any) -> str:
        return ""

    monkeypatch.setattr(replacing, "replace_pod", replaced)
    monkeypatch.setattr(preflight, "preflight", fine)
    newer = home.pod.save(20, 8)  # it still answers: its newest comes home first
    home.written(newer)
    said = await lm_migration.go_on(home.ctx, ["p0r0"])
    assert said.endswith("goes on from step 20, restored from home")
    assert checkpoint.verify_step(other.checkpoints, 20, run=RUN).sha256 == newer.sha256
    assert [p.name for p in other.checkpoints.iterdir()] == ["step-20"]
    assert (other.root / f".uvcc/runs/{RUN}/training.csv").read_text().endswith("10,0.5\n")
    assert lm_migration.count(home.ctx) == 1


async def test_the_only_copy_is_never_given_up(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(ctx: Any, name: str) -> str:
        raise AssertionError("a pod was deleted")

    monkeypatch.setattr(replacing, "replace_pod", never)
    made = home.pod.save(10, 7)
    home.written(made)
    home.pod.cut_after = 0
    with pytest.raises(ConfigError, match="p0r0 holds the only checkpoints of this run"):
        await lm_migration.go_on(home.ctx, ["p0r0"])
    home.pod.cut_after = math.inf
    await home.bring(made)
    path = home.root / "step-10" / "rank0.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    home.pod.cut_after = 0
    with pytest.raises(VerificationError, match="was altered"):
        await lm_migration.go_on(home.ctx, ["p0r0"])


async def test_an_earlier_step_is_taken_from_the_pod_or_from_home_or_refused_with_those_there_are(home: Home) -> None:
    first = home.pod.save(10, 7)
    await home.bring(first)
    home.pod.save(20, 8)
    home.ctx.start_from = 20
    assert await earlier_checkpoint.chosen(home.ctx, home.phase) == 20
    assert await earlier_checkpoint.chosen(home.ctx, home.phase) == -1  # a choice counts once
    shutil.rmtree(first.path)
    home.ctx.start_from = 10
    assert await earlier_checkpoint.chosen(home.ctx, home.phase) == 10
    assert checkpoint.verify_step(home.pod.checkpoints, 10, run=RUN).sha256 == first.sha256
    home.ctx.start_from = 15
    with pytest.raises(UvccError, match="no checkpoint of step 15; there are those of steps 10, 20"):
        await earlier_checkpoint.chosen(home.ctx, home.phase)


async def test_a_training_does_not_start_over_because_its_new_pod_got_no_checkpoint(home: Home) -> None:
    """A conductor that dies after it rented another pod, and before the checkpoint was there, is followed by one."""
    first = home.pod.save(10, 7)
    await home.bring(first)
    newest = home.pod.save(20, 8)
    await home.bring(newest)
    shutil.rmtree(home.pod.checkpoints)
    assert await earlier_checkpoint.chosen(home.ctx, home.phase) == -1
    assert checkpoint.verify_step(home.pod.checkpoints, 20, run=RUN).sha256 == newest.sha256
    said = [e.text for _, e in iter_events(home.ctx.run_dir / "journal.sqlite") if isinstance(e, ev.Alert)]
    assert "p0r0 had no checkpoint: that of step 20 was put back from home" in said
    shutil.rmtree(newest.path)
    home.pod.save(10, 7)
    assert await earlier_checkpoint.chosen(home.ctx, home.phase) == -1  # it has one: what is home stays there
    assert checkpoint.steps_present(home.pod.checkpoints) == [10]


async def test_private_checkpoints_never_come_home(tmp_path: Path) -> None:
    world = World(tmp_path, "private")
    world.ctx.members["p0r0"].link = cast(Any, object())  # whoever used it would fail
    fields = {"step": 5, "sha256": "ab" * 32}
    world.bus.commit(ev.EngineEvent(pod="p0r0", level="info", event="checkpoint_written", fields=fields))
    async with asyncio.timeout(120):
        await checkpoint_copies.keep_home(world.ctx)  # it has nothing to do, ever
    assert not (world.ctx.artifacts / "full").exists()
    world.journal.close()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "shorter than"),
        (struct.pack("<Q", 1 << 40) + b"{}", "header would have"),
        (struct.pack("<Q", 2) + b"[]", "not an object"),
        (struct.pack("<Q", 2) + b"{x", "not JSON"),
        (tensors(1)[:-1], "its tensors have"),
        (tensors(1) + b"x", "its tensors have"),
        (tensors(1).replace(b"U8", b"U9"), "no known type"),
        (tensors(1).replace(b"[300000]", b"[300001]"), "its shape says"),
        (tensors(1).replace(b"[0, 300000]", b"[1, 300001]"), "begins at byte 1"),
    ],
    ids=["empty", "long", "list", "text", "short", "rest", "type", "shape", "gap"],
)
def test_a_header_that_lies_is_found_without_torch(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(VerificationError, match=words):
        check_tensors(path)
    path.write_bytes(tensors(3))
    assert check_tensors(path) == 1


@pytest.mark.parametrize(
    ("texts", "masks"),
    [
        ([], 0),
        (['{"least":1}'], 1),
        (['{"least":1}', '{"least":3}'], 3),
        (['{"least":99999999999}', '{"least":-4}', '{"least":true}', "[]", "x" * 400], 0),
        (['{"least":65}'], 0),  # so far ahead that the numbers would run out: not obeyed
    ],
)
async def test_the_next_start_takes_the_attempt_that_a_pod_needs(home: Home, texts: list[str], masks: int) -> None:
    phase = replace(home.phase, kind="private")
    folder = home.pod.root / f".uvcc/runs/{phase.engine_run}"
    folder.mkdir(parents=True)
    for n, text in enumerate(texts):
        (folder / f"least_attempt_p0r0s0t{n}.json").write_text(text + "\n")
    assert await earlier_checkpoint.masks(home.ctx, phase, -1) == masks
    assert await earlier_checkpoint.masks(home.ctx, phase, 0) == max(masks, 1)  # starting over is another attempt
