"""Where a pod's checkpoints go: the console's own script, played in folders of this machine."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from uvcc_console.fleet.cloud.intents import VOLUMES_FILE, Intents
from uvcc_console.plan.profile import parse
from uvcc_console.rollout.stages.fleet import volume
from uvcc_engine.contract.errors import UvccError

POD = "uvcc-r-20261121-0115-ab12-p0r0"
LM = {"kind": "lm", "steps": 4}


class Pod:
    """A shell in a home of its own; ``mounted``: folders that count as mounts."""

    def __init__(self, home: Path, mounted: list[Path]) -> None:
        self.home, self.bin = home, home / "bin"
        self.bin.mkdir(parents=True)
        cases = "|".join(str(m) for m in mounted) or "-"
        stat = f"#!/bin/sh\ncase $3 in {cases}) echo 7 ;; *) echo 1 ;; esac\n"
        (self.bin / "stat").write_text(stat)
        (self.bin / "stat").chmod(0o755)

    async def sh(self, script: str, *, timeout: float) -> str:
        env = {"HOME": str(self.home), "PATH": f"{self.bin}:{os.environ['PATH']}"}
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            "sh", "-c", script, cwd=self.home, env=env, stdout=pipe, stderr=pipe
        )
        out, err = await asyncio.wait_for(process.communicate(), timeout)
        if process.returncode:
            raise UvccError(err.decode().strip())
        return out.decode()


class Run:
    def __init__(self, tmp_path: Path, fleet: dict[str, Any], mounted: list[Path]) -> None:
        self.pod = Pod(tmp_path / "pod", mounted)
        self.run_dir = tmp_path / "run"
        self.run_dir.mkdir()
        profile = parse({"job": LM, "fleet": fleet, "limits": {"hourly": 9, "total": 9}})
        self.phase: Any = SimpleNamespace(engine_run="r.full")
        request = SimpleNamespace(party=0, name=POD)
        self.member: Any = SimpleNamespace(name="p0r0", request=request, ssh=self.pod, link=object())
        self.said: list[Any] = []
        self.ctx: Any = SimpleNamespace(
            plan=SimpleNamespace(profile=profile, phases={"full": self.phase}),
            run_dir=self.run_dir,
            live=lambda: [self.member],
            say=self.said.append,
        )

    def told(self, **fields: Any) -> None:
        Intents(self.run_dir / VOLUMES_FILE).note(1.0, name=f"{POD}xaaaaaa", id="1", held=True, **fields)

    async def lay(self) -> Path:
        await volume.lay(self.ctx, self.phase, [self.member])
        return (self.pod.home / ".uvcc/runs/r.full/checkpoints").resolve()


async def test_checkpoints_go_where_the_vendor_says_that_the_volume_is(tmp_path: Path) -> None:
    there = tmp_path / "work space"
    there.mkdir()
    run = Run(tmp_path, {"provider": "prime", "volume": {"size_gb": 50}}, [])
    with pytest.raises(UvccError, match="prime does not say where the volume of pod p0r0 is mounted"):
        await run.lay()
    run.told(mount=str(there))
    with pytest.raises(UvccError, match="nothing is mounted at"):  # the folder is there, and is the image's own
        await run.lay()
    (run.pod.bin / "stat").write_text("#!/bin/sh\ncase $3 in */..) echo 1 ;; *) echo 7 ;; esac\n")
    assert await run.lay() == there / "uvcc-checkpoints/r.full/p0r0"
    await volume.clear(run.ctx)  # the volume goes as a whole
    assert (there / "uvcc-checkpoints/r.full/p0r0").is_dir()


async def test_of_a_volume_that_was_there_only_the_run_s_own_goes(tmp_path: Path) -> None:
    there = tmp_path / "ours"
    (there / "uvcc-checkpoints/other.full/p0r0").mkdir(parents=True)
    run = Run(tmp_path, {"provider": "runpod", "volume": {"name": "ours"}}, [there])
    run.told(mount=str(there), given=True)
    laid = await run.lay()
    assert laid == there / "uvcc-checkpoints/r.full/p0r0"
    (laid / "step-4").mkdir()
    await volume.clear(run.ctx)
    assert sorted(p.name for p in (there / "uvcc-checkpoints").iterdir()) == ["other.full"]
    assert run.said == []


async def test_with_keep_what_lies_there_stays(tmp_path: Path) -> None:
    there = tmp_path / "ours"
    there.mkdir()
    run = Run(tmp_path, {"provider": "runpod", "volume": {"name": "ours", "keep": True}}, [there])
    run.told(mount=str(there), given=True)
    laid = await run.lay()
    await volume.clear(run.ctx)
    assert laid.is_dir()


async def test_a_run_from_before_finds_its_volume_by_its_kind(tmp_path: Path) -> None:
    """Its folder does not say where the volume is mounted: what is usual at the provider counts."""
    run = Run(tmp_path, {"provider": "lambda", "volume": {"size_gb": 50}}, [])
    with pytest.raises(UvccError, match=f"there is no /lambda/nfs/{POD}x"):
        await run.lay()
