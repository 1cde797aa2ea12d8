"""The market refuses the run's key in the middle of it: what may be there is known without asking, and ended later."""

from __future__ import annotations

from pathlib import Path

import primefake
import pytest
from primeworld import RUN, new_world

from uvcc_console.fleet.prime.client import CloudRefused
from uvcc_console.fleet.provider import Pod, Remembers
from uvcc_engine.contract.errors import UnreachableError


async def test_what_may_be_left_is_known_and_ended_once_the_key_is_right(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with new_world(run_dir) as w:
        assert isinstance(w.provider, Remembers)
        assert w.provider.begun(f"{RUN}-") == set()  # nothing was asked for: whoever refuses us now leaks nothing
        pods = await w.up()
        names = {pod.name for pod in pods}
        monkeypatch.setattr(primefake, "KEY", "another")
        with pytest.raises(CloudRefused, match="401"):
            await w.provider.list(f"{RUN}-")
        assert w.provider.begun(f"{RUN}-") == names
        with pytest.raises(UnreachableError, match="is not proven gone"):
            await w.provider.delete(pods[0])
        assert len(w.ours) == 3
        monkeypatch.undo()
        later = w.console()  # another process, with nothing but the names
        for pod in pods:
            await later.delete(Pod(pod.name, pod.party, pod.replica, "prime", ""))
        assert w.ours == []
        assert later.begun(f"{RUN}-") == set()
        await later.close()
