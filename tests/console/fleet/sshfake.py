"""An SSH server in the test's own process whose exec requests are answered by a coroutine of the test."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import asyncssh

from uvcc_console.fleet.dialer import Timeouts

# comes again soon, and waits long: whoever answers has the time of a busy machine
QUICK = Timeouts(
    connect=60.0,
    login=60.0,
    operation=60.0,
    keepalive_s=10.0,
    backoff_first=0.01,
    backoff_last=0.05,
)
Handler = Callable[[asyncssh.SSHServerProcess], Awaitable[None]]


@dataclass
class SshFake:
    """One host. ``handle`` answers every exec; connections can be dropped and the host key changed."""

    client_key: asyncssh.SSHKey
    handle: Handler
    host_key: asyncssh.SSHKey = field(default_factory=lambda: asyncssh.generate_private_key("ssh-ed25519"))
    connections: list[asyncssh.SSHServerConnection] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    port: int = 0
    ciphers: str = "default"
    sftp: bool | Callable[[asyncssh.SSHServerChannel], asyncssh.SFTPServer] = True
    _server: asyncssh.SSHAcceptor | None = None

    @property
    def address(self) -> str:
        return f"tester@127.0.0.1:{self.port}"

    async def start(self) -> SshFake:
        fake = self

        class Server(asyncssh.SSHServer):
            def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
                fake.connections.append(conn)

        async def serve(process: asyncssh.SSHServerProcess) -> None:
            fake.commands.append(process.command or "")
            await fake.handle(process)

        self._server = await asyncssh.listen(
            "127.0.0.1",
            self.port,
            server_factory=Server,
            server_host_keys=[self.host_key],
            authorized_client_keys=asyncssh.import_authorized_keys(self.client_key.export_public_key().decode()),
            process_factory=serve,
            sftp_factory=self.sftp,
            encryption_algs=self.ciphers,
            encoding=None,
            reuse_address=True,
        )
        self.port = self._server.get_port()
        return self

    def drop(self) -> None:
        """Cut every connection without a goodbye."""
        for connection in self.connections:
            connection.abort()
        self.connections.clear()

    async def stop(self) -> None:
        self.drop()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
            self._server = None
