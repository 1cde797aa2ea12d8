"""Which cluster, and who we are there: a kubeconfig file as ``kubectl`` has it, or a pod's own account in its cluster.

Every request carries what is valid at that moment: a token is read again, and a plug-in (``exec``, as the managed
clusters of the clouds have it) is asked again, before what it said runs out.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import os
import ssl
import stat
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import yaml

from uvcc_console.fleet.cloud.fields import part
from uvcc_engine.contract.errors import ConfigError, UnreachableError
from uvcc_engine.contract.parsing import yaml_text
from uvcc_engine.contract.parsing.small_text import MOST_TOKEN, read_small, read_small_bytes
from uvcc_engine.contract.parsing.untrusted import json_of
from uvcc_engine.contract.text import clean

ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
PLUGIN_S: Final = 60.0
EARLY_S: Final = 60.0


class Who(httpx.Auth):
    """Puts the token of the moment into each request. ``file`` and ``plugin``: where it comes from."""

    def __init__(self, token: str = "", file: str = "", plugin: Mapping[str, Any] | None = None) -> None:
        self._token, self._file, self._plugin = token, file, plugin or {}
        self._until = 0.0
        self._asking = asyncio.Lock()

    async def token(self) -> str:
        """Raises ConfigError where there is none to be had."""
        if self._file:
            try:
                return read_small(Path(self._file), MOST_TOKEN).strip()
            except (OSError, ValueError) as e:
                raise ConfigError(f"cannot read the token in {self._file}: {e}", "see the kubeconfig's user") from e
        if self._plugin:
            async with self._asking:
                if not self._token or time.time() > self._until - EARLY_S:
                    self._token, self._until = await _ask(self._plugin)
        return self._token

    async def async_auth_flow(self, request: httpx.Request) -> AsyncGenerator[httpx.Request, httpx.Response]:
        if token := await self.token():
            request.headers["Authorization"] = f"Bearer {token}"
        else:
            request.headers.pop("Authorization", None)  # a certificate speaks for us
        yield request


@dataclass(frozen=True)
class Cluster:
    """One cluster and one user of it. ``tls``: None for plain HTTP, to this machine alone."""

    server: str
    namespace: str
    who: Who
    tls: ssl.SSLContext | None
    name: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)


def find(context: str = "", file: str = "", namespace: str = "", env: Mapping[str, str] | None = None) -> Cluster:
    """The cluster that a context names (empty: the current one), or the one that this process is a pod of.

    Raises ConfigError saying what is missing, and where it was looked for.
    """
    env = os.environ if env is None else env
    paths = [Path(p).expanduser() for p in ([file] if file else env.get("KUBECONFIG", "").split(os.pathsep)) if p]
    paths = paths or [Path("~/.kube/config").expanduser()]
    if not any(p.exists() for p in paths):
        if env.get("KUBERNETES_SERVICE_HOST") and (ACCOUNT / "token").exists() and not context and not file:
            return _inside(env, namespace)
        hint = "set fleet.kubeconfig or KUBECONFIG, or log in to the cluster with its own tool"
        raise ConfigError(f"no kubeconfig at {', '.join(map(str, paths))}", hint)
    said = _read([p for p in paths if p.exists()])
    chosen = context or str(said["current-context"])
    if chosen not in said["contexts"]:
        known = ", ".join(said["contexts"]) or "none"
        raise ConfigError(f"the kubeconfig has no context {chosen!r}", f"it has: {clean(known)[:300]}")
    at = said["contexts"][chosen]
    cluster, user = said["clusters"].get(str(at.get("cluster"))), said["users"].get(str(at.get("user")), {})
    if cluster is None:
        raise ConfigError(f"the kubeconfig's context {chosen} names no cluster that it has", "kubectl config view")
    place = namespace or str(at.get("namespace") or "default")
    plugin = part(user.get("exec"))
    token = str(user.get("token") or "")
    who = Who(token, "" if token else str(user.get("tokenFile") or ""), plugin)
    return Cluster(_server(cluster), place, who, _tls(cluster, user), chosen)


def _inside(env: Mapping[str, str], namespace: str) -> Cluster:
    host, port = env["KUBERNETES_SERVICE_HOST"], env.get("KUBERNETES_SERVICE_PORT", "443")
    server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    own = ACCOUNT / "namespace"
    place = namespace or (read_small(own).strip() if own.exists() else "default")
    tls = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    return Cluster(server, place, Who(file=str(ACCOUNT / "token")), tls, "in-cluster")


def _read(paths: list[Path]) -> dict[str, Any]:
    """The files as one: of what two of them name, the first counts, as with kubectl."""
    found: dict[str, Any] = {"clusters": {}, "users": {}, "contexts": {}, "current-context": ""}
    for path in paths:
        if stat.S_IMODE(path.stat().st_mode) & 0o022:
            raise ConfigError(f"others can write to {path}, which may name programs to run", f"chmod go-w {path}")
        try:
            said = yaml_text.load(read_small(path))
        except (OSError, ValueError, yaml.YAMLError) as e:
            raise ConfigError(f"cannot read {path}: {clean(str(e))[:200]}", "kubectl config view") from e
        if not isinstance(said, Mapping):
            raise ConfigError(f"{path} is no kubeconfig", "kubectl config view")
        found["current-context"] = found["current-context"] or str(said.get("current-context") or "")
        for kind, inner in (("clusters", "cluster"), ("users", "user"), ("contexts", "context")):
            rows = said.get(kind)
            for row in rows if isinstance(rows, list) else []:
                own = dict(part(part(row).get(inner)))
                for key in ("certificate-authority", "client-certificate", "client-key", "tokenFile"):
                    if own.get(key):  # relative to the file that names it
                        own[key] = str(path.parent / Path(str(own[key])).expanduser())
                found[kind].setdefault(str(part(row).get("name")), own)
    return found


def _server(cluster: Mapping[str, Any]) -> str:
    server = str(cluster.get("server") or "").rstrip("/")
    parts = urlsplit(server)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"the kubeconfig's server {server[:100]!r} is no URL", "kubectl config view")
    if parts.scheme == "http" and parts.hostname not in ("localhost", "127.0.0.1", "::1"):
        raise ConfigError(f"no credentials go to {parts.hostname} over plain HTTP", "use https://")
    return server


def _tls(cluster: Mapping[str, Any], user: Mapping[str, Any]) -> ssl.SSLContext | None:
    """What the server's certificate is held against, and the user's own where they have one."""
    if str(cluster.get("server") or "").startswith("http://"):
        return None
    if cluster.get("insecure-skip-tls-verify"):
        hint = "name its certificate authority instead: certificate-authority-data"
        raise ConfigError("the kubeconfig would speak to a server that nobody has checked", hint)
    try:
        data = _data(cluster, "certificate-authority")
        context = ssl.create_default_context(cadata=data.decode() if data else None)
        certificate, key = _data(user, "client-certificate"), _data(user, "client-key")
        if certificate and key:
            with tempfile.TemporaryDirectory(prefix="uvcc-kube-") as folder:  # ssl reads certificates from files only
                both = Path(folder) / "user.pem"
                both.touch(0o600)
                both.write_bytes(certificate + b"\n" + key)
                context.load_cert_chain(both)
    except (OSError, ssl.SSLError, ValueError) as e:
        raise ConfigError(f"the kubeconfig's certificates cannot be used: {e}", "kubectl config view --raw") from e
    return context


def _data(row: Mapping[str, Any], key: str) -> bytes:
    """Certificate or key, from where it stands in the file, or from the file that it names."""
    if given := row.get(f"{key}-data"):
        try:
            return base64.b64decode(str(given), validate=True)
        except binascii.Error as e:
            raise ValueError(f"{key}-data is not base64") from e
    return read_small_bytes(Path(str(row[key]))) if row.get(key) else b""


async def _ask(plugin: Mapping[str, Any]) -> tuple[str, float]:
    """(token, until when) from a credential plug-in. It gets no terminal: a login by hand comes before the run."""
    rows = plugin.get("env")
    own = {str(part(e).get("name")): str(part(e).get("value", "")) for e in (rows if isinstance(rows, list) else [])}
    version = str(plugin.get("apiVersion") or "client.authentication.k8s.io/v1")
    info = {"apiVersion": version, "kind": "ExecCredential", "spec": {"interactive": False}}
    env = {**os.environ, **own, "KUBERNETES_EXEC_INFO": json.dumps(info)}
    command = str(plugin.get("command") or "")
    args = plugin.get("args")
    words = [str(a) for a in (args if isinstance(args, list) else [])]
    pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    try:
        process = await asyncio.create_subprocess_exec(command, *words, env=env, stdin=null, stdout=pipe, stderr=pipe)
    except (OSError, ValueError) as e:
        hint = clean(str(plugin.get("installHint") or "install it, or log in anew"))[:300]
        raise ConfigError(f"the kubeconfig's plug-in {command[:80]!r} cannot be run: {e}", hint) from e
    try:
        async with asyncio.timeout(PLUGIN_S):
            out, err = await process.communicate()
    except TimeoutError:
        raise UnreachableError(f"the kubeconfig's plug-in {command[:80]} gave no answer in {PLUGIN_S:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        status = part(part(json_of(out)).get("status")) if process.returncode == 0 else {}
    except (ValueError, UnicodeDecodeError):
        status = {}
    token = status.get("token")
    if not isinstance(token, str) or not token or not token.isascii() or not token.isprintable():
        why = clean(err.decode(errors="replace").strip())[:300]
        raise ConfigError(f"the kubeconfig's plug-in {command[:80]} gave no token: {why}", "log in to the cluster anew")
    try:
        until = datetime.fromisoformat(str(status["expirationTimestamp"]).replace("Z", "+00:00")).timestamp()
    except (KeyError, ValueError):
        until = time.time() + 600.0
    return token, until
