from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import asyncssh
import pytest
from agentfake import AgentFake
from sshfake import QUICK, Handler, SshFake

from uvcc_console.fleet.ssh import PodLink


@pytest.fixture(scope="session")
def client_key() -> asyncssh.SSHKey:
    return asyncssh.generate_private_key("ssh-ed25519")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


@pytest.fixture
async def ssh_fake(client_key: asyncssh.SSHKey) -> AsyncIterator[Callable]:
    made: list[SshFake] = []

    async def make(handle: Handler, **options: object) -> SshFake:
        fake = await SshFake(client_key, handle, **options).start()
        made.append(fake)
        return fake

    yield make
    for fake in made:
        await fake.stop()


@pytest.fixture
async def link_to(client_key: asyncssh.SSHKey) -> AsyncIterator[Callable[..., PodLink]]:
    made: list[PodLink] = []

    def make(address: str, **options: object) -> PodLink:
        link = PodLink("p0r0", address, client_key, **{"timeouts": QUICK, **options})
        made.append(link)
        return link

    yield make
    for link in made:
        await link.close()


@pytest.fixture
def agent_fake() -> AgentFake:
    return AgentFake()
