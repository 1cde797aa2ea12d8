"""The API server of :mod:`kubefake` as a real one: HTTPS on 127.0.0.1 with an authority of its own, and port-forward.

``python`` clients and ``kubectl`` reach it by the kubeconfig that it writes.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime
import ipaddress
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn
import yaml
from cloudfake import KEY
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from kubefake import NAMESPACE, KubernetesFake
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.exceptions import InvalidState


def _certificate(folder: Path) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kubernetes")])
    now = datetime.datetime.now(datetime.UTC)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=2))
        .add_extension(names, False)
        .add_extension(x509.BasicConstraints(True, 0), True)
        .sign(key, hashes.SHA256())
    )
    cert, private = folder / "ca.pem", folder / "ca.key"
    cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8
    private.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    return cert, private


class KubeServer:
    """``ssh``: the port of this machine where a pod's port 2222 ends; ``says``: an error on its channel."""

    def __init__(self, fake: KubernetesFake, folder: Path) -> None:
        self.fake, self.ssh, self.says, self.opened, self.wrong_port = fake, 0, "", 0, False
        self._cert, key = _certificate(folder)
        routes = [
            WebSocketRoute("/api/v1/namespaces/{ns}/pods/{name}/portforward", self._forward),
            Route("/{path:path}", self._rest, methods=["GET", "POST", "DELETE"]),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes), "127.0.0.1", 0, log_level="error", ssl_certfile=self._cert, ssl_keyfile=key
        )
        self.server = uvicorn.Server(config)
        self.port = 0

    def kubeconfig(self, path: Path, **user: Any) -> Path:
        ca = base64.b64encode(self._cert.read_bytes()).decode()
        said = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "lab",
            "contexts": [{"name": "lab", "context": {"cluster": "c", "user": "u", "namespace": NAMESPACE}}],
            "clusters": [
                {"name": "c", "cluster": {"server": f"https://127.0.0.1:{self.port}", "certificate-authority-data": ca}}
            ],
            "users": [{"name": "u", "user": user or {"token": KEY}}],
        }
        path.write_text(yaml.safe_dump(said))
        path.chmod(0o600)
        return path

    async def _rest(self, request: Request) -> Response:
        body = await request.body()
        asked = httpx.Request(request.method, str(request.url), headers=request.headers.raw, content=body)
        done = self.fake.serve(asked)
        return Response(done.content, done.status_code, dict(done.headers))

    async def _forward(self, web: WebSocket) -> None:
        if web.headers.get("authorization") != f"Bearer {KEY}":
            return await web.close(1008)
        if self.fake.named(web.path_params["name"]) is None or web.query_params.get("ports") != "2222":
            return await web.close(1008)
        await web.accept("v4.channel.k8s.io")
        self.opened += 1
        port = (1 if self.wrong_port else 2222).to_bytes(2, "little")
        await web.send_bytes(b"\x00" + port)
        await web.send_bytes(b"\x01" + port)
        if self.says:
            await web.send_bytes(b"\x01" + self.says.encode())
            return await web.close()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.ssh)
        except ConnectionRefusedError:  # its server is not up yet
            return await web.close()

        async def down() -> None:
            with contextlib.suppress(RuntimeError, WebSocketDisconnect):  # the client has gone first
                while data := await reader.read(4096):
                    await web.send_bytes(b"\x00" + data)
                await web.close()

        task = asyncio.create_task(down())
        try:
            while True:
                data = await web.receive_bytes()
                assert data[:1] == b"\x00"
                writer.write(data[1:])
        except (WebSocketDisconnect, RuntimeError):
            pass
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            writer.close()


@asynccontextmanager
async def kube_server(fake: KubernetesFake, folder: Path) -> AsyncIterator[KubeServer]:
    made = KubeServer(fake, folder)
    task = asyncio.create_task(made.server.serve())
    while not made.server.started:
        assert not task.done()
        await asyncio.sleep(0.01)
    made.port = made.server.servers[0].sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        made.server.should_exit = True
        with contextlib.suppress(InvalidState):  # uvicorn closes a tunnel once more whose client is just closing it
            await task
