"""The run's SSH key on the account: it must be there before a pod is made, and leaves with the run's last pod."""

from __future__ import annotations

import asyncio
from pathlib import Path

from uvcc_console.fleet import ssh_keys
from uvcc_console.fleet.cloud.calls import CloudRefused
from uvcc_console.fleet.cloud.intents import base_of
from uvcc_console.fleet.cloud.vendor import Cloud
from uvcc_engine.contract.errors import UnreachableError

PREFIX = "uvcc-"
FORGET_S = 15.0  # for the end of a run, which a silent API shall not hold up


class RunKey:
    """One run's key. ``key_file`` is the user's own, empty for one that is made for the run."""

    def __init__(self, client: Cloud, run_dir: Path, key_file: str) -> None:
        self._client = client
        self._run_dir = run_dir
        self._key_file = key_file
        self._id = ""
        self._asking = asyncio.Lock()

    async def id(self) -> str:
        """Its id on the account; it is added if it is not there yet."""
        async with self._asking:
            if self._id:
                return self._id
            line = ssh_keys.public_line(ssh_keys.operator_key(self._run_dir, self._key_file))
            material = tuple(line.split()[:2])
            known = {k.material: k.id for k in await self._client.ssh_keys()}
            if material not in known:
                known[material] = await self._add(f"{PREFIX}{self._run_dir.name}", line, material)
            self._id = known[material]
            return self._id

    async def _add(self, name: str, line: str, material: tuple[str, ...]) -> str:
        """Add the key. A vendor may refuse one that another party of this run has added at this moment."""
        try:
            return (await self._client.add_ssh_key(name, line)).id
        except CloudRefused:
            for key in await self._client.ssh_keys():
                if key.material == material:
                    return key.id
            raise

    async def forget(self) -> None:
        """Take it from the account if no pod of the run is left."""
        name = f"{PREFIX}{self._run_dir.name}"
        try:
            async with asyncio.timeout(FORGET_S):
                if any(base_of(p.name).startswith(f"{name}-") and not p.over for p in await self._client.pods()):
                    return
                for key in await self._client.ssh_keys():
                    if key.name == name:
                        await self._client.delete_ssh_key(key.id)
        except (UnreachableError, CloudRefused, TimeoutError):
            return  # a key without a pod opens nothing and costs nothing
        self._id = ""
