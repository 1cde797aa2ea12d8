"""The code of a command on a real OpenSSH server: whole or not at all, found by a second start, set up once."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import asyncssh
import pytest
from opensshd import Sshd, why_not

from uvcc_console.fleet.ssh import PodLink, Timeouts
from uvcc_console.plan import code_tree
from uvcc_console.plan.schema import CommandJobSettings
from uvcc_console.rollout.stages.fleet import code
from uvcc_engine.contract.errors import UvccError

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "it runs")
QUICK = Timeouts(connect=60.0, login=60.0, operation=60.0)


async def test_half_a_tree_is_never_found_and_a_second_start_does_nothing_twice(tmp_path: Path) -> None:
    mine, run_dir, home = tmp_path / "mine", tmp_path / "run", tmp_path / "pod"
    for folder in (mine, run_dir, home):
        folder.mkdir()
    (mine / "train.py").write_text("print(1)\n")
    setup = 'echo once >>"$HOME/setups"; command -v pip >"$HOME/pip"; pip --version >>"$HOME/pip"'
    job = CommandJobSettings(kind="command", argv=["x"], steps=1, code=str(mine), setup=setup)
    tree = code_tree.survey(job)
    code_tree.keep(tree, run_dir)
    client = asyncssh.generate_private_key("ssh-ed25519")
    server = Sshd(tmp_path / "sshd", client, home=home)
    await server.start()
    link = PodLink("p0r0", server.address, client, timeouts=QUICK)
    said: list[str] = []

    def ctx(job: CommandJobSettings) -> Any:
        return cast(Any, SimpleNamespace(run_dir=run_dir, plan=SimpleNamespace(profile=SimpleNamespace(job=job))))

    try:
        await link.sh(f"mkdir -p {code.CODE}/{tree.sha256}.part; echo half >{code.CODE}/{tree.sha256}.part/train.py")
        await code.bring(ctx(job), link, sys.executable, lambda step, detail: said.append(step))
        await code.bring(ctx(job), link, sys.executable, lambda step, detail: said.append(step))
        assert said == ["code", "setup"]
        assert (home / code.CODE / tree.sha256 / "train.py").read_text() == "print(1)\n"
        assert sorted(p.suffix for p in (home / code.CODE).iterdir() if p.is_dir()) == ["", ".env"]
        assert (home / "setups").read_text() == "once\n"
        pip, version = (home / "pip").read_text().splitlines()
        assert pip == str(home / code.CODE / f"{tree.sha256}.env" / "bin" / "pip")
        assert version.startswith("pip ")
        await code.work_folder(ctx(job), link, "mine.full")
        work = home / code.WORK / "mine.full" / "train.py"
        work.write_text("changed by the run")
        await code.work_folder(ctx(job), link, "mine.full")  # a resume finds it as it was left
        assert work.read_text() == "changed by the run"
        bad = job.model_copy(update={"setup": "echo no such package >&2; exit 3"})
        with pytest.raises(UvccError, match="no such package"):
            await code.bring(ctx(bad), link, sys.executable, lambda step, detail: None)
        auto = job.model_copy(update={"setup": code.AUTO})
        with pytest.raises(UvccError, match=r"no requirements\.txt or pyproject\.toml"):
            await code.bring(ctx(auto), link, sys.executable, lambda step, detail: None)
    finally:
        await link.close()
        await server.stop()
