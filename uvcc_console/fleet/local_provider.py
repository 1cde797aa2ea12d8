"""Pods on this machine: one detached process each. The rest of the console drives them like any remote host."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from uvcc_console.core.log import logger
from uvcc_console.fleet import podhome, procs, ssh_keys
from uvcc_console.fleet.local.imports_shared import SharedImports
from uvcc_console.fleet.provider import Pod, PodRequest, Quote, QuoteLine
from uvcc_console.fleet.provider_kinds import GIVEN, FleetSettings, ProviderKind
from uvcc_engine.contract.errors import UnreachableError, UvccError
from uvcc_engine.contract.parsing.untrusted import json_of

log = logger(__name__)

READY_S = 60.0
_LONGEST_HOME = 60  # a unix socket path has 108 bytes; the agent and the relay put theirs below the home


def make(fleet: Mapping[str, Any], run_dir: Path, ttl_s: float) -> LocalProvider:
    return LocalProvider(run_dir, ttl_s=ttl_s, key_file=str(fleet.get("ssh_key", "")))


def temp_root() -> Path:
    """The system's temporary folder, or /tmp where that one's path is too long for sockets.

    Python's own choice depends on where there is room just now, and a pod shall be found again on a disk that is full.
    """
    given = [Path(os.environ[name]) for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name)]
    root = next((path for path in given if path.is_dir()), Path("/tmp"))
    return root if len(str(root)) + 20 <= _LONGEST_HOME else Path("/tmp")


class LocalProvider:
    """Processes with an SSH server each. A pod's record lies beside its home until the pod is proven gone."""

    name = "local"

    def __init__(self, run_dir: Path, *, ttl_s: float = 3600.0, key_file: str = "") -> None:
        self._run_dir = run_dir
        self._ttl_s = ttl_s
        self._key_file = key_file
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        digest = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()
        self._base = temp_root() / f"uvcc-{digest[:8]}"
        self.imports = SharedImports(self._base, ttl_s)

    async def quote(self, requests: Sequence[PodRequest]) -> Quote:
        return Quote(tuple(QuoteLine(r, self.name, "local", 0.0) for r in requests), time.time())

    async def create(self, request: PodRequest) -> Pod:
        """Start the pod's process; a pod of this name that lives already is adopted."""
        home = self._base / f"p{request.party}r{request.replica}"
        pod = Pod(request.name, request.party, request.replica, self.name, str(home), region="local")
        if (ready := _ready(home)) and _lives(ready):
            return _addressed(pod, ready)
        await asyncio.to_thread(_end, home)
        await asyncio.to_thread(self._start, pod, home)
        log.info("started at %s", home, pod=pod.name)
        return pod

    def _start(self, pod: Pod, home: Path) -> None:
        try:
            _make_home(self._base, home)
            (home / ".tmp").mkdir(mode=0o700)
            _record(home).write_text(json.dumps(asdict(pod)))  # before the process: a crash in between leaks nothing
            shared = self.imports.ensure()
            authorized = home.with_suffix(".keys")
            authorized.write_text(ssh_keys.public_line(ssh_keys.operator_key(self._run_dir, self._key_file)) + "\n")
            command = [sys.executable, "-m", "uvcc_console.fleet.local.localpod", "--home", str(home)]
            command += ["--authorized-keys", str(authorized), "--ready-file", str(home.with_suffix(".ready"))]
            command += ["--ttl", str(self._ttl_s), "--watch", str(self._run_dir), "--watch", str(_record(home))]
            with open(home.with_suffix(".log"), "ab") as out:
                self.children[str(home)] = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    cwd=home,
                    # what a pod leaves behind when it is ended while it starts goes with its home
                    env={**os.environ, **shared, "TMPDIR": str(home / ".tmp"), procs.MARK: str(home)},
                    start_new_session=True,
                )
        except OSError as e:
            raise UvccError(
                f"cannot start pod {pod.name}: {e}", f"is {self._base.parent} writable and not full?"
            ) from e

    async def wait_ready(self, pod: Pod) -> Pod:
        home = Path(pod.provider_id)
        end = time.monotonic() + READY_S
        while time.monotonic() < end:
            if (ready := _ready(home)) and _lives(ready):
                return _addressed(pod, ready)
            child = self.children.get(str(home))
            if (child is not None and child.poll() is not None) or not home.exists():
                raise UvccError(f"pod {pod.name} ended while starting: {_tail(home)}", "see the pod's log and retry")
            await asyncio.sleep(0.02)
        raise UnreachableError(f"pod {pod.name} was not ready in {READY_S:.0f} s", "is this machine overloaded?")

    async def delete(self, pod: Pod) -> None:
        if not pod.provider_id:
            raise UnreachableError(f"where pod {pod.name} lived is not known", "see: uvcc doctor")
        home = Path(pod.provider_id)
        left = await asyncio.to_thread(_end, home)
        if (child := self.children.pop(str(home), None)) is not None:
            await asyncio.to_thread(child.wait, 5.0)
        if left:
            log.error("it is not gone: %s", sorted(left), pod=pod.name)
            raise UnreachableError(f"pod {pod.name} is not gone: processes {sorted(left)}", "end them by hand")
        if home.exists():
            what = f"of pod {pod.name} no process is left, but its folder {home} cannot be removed"
            raise UnreachableError(what, "does its disk take no writes? then remove it by hand")

    async def list(self, prefix: str) -> list[Pod]:
        found = []
        for pod in _recorded():
            if pod.name.startswith(prefix):
                ready = _ready(Path(pod.provider_id))
                found.append(_addressed(pod, ready) if ready else pod)
        return found

    def begun(self, prefix: str) -> set[str]:
        """Pods whose record lies there: it is written before the process is started."""
        return {pod.name for pod in _recorded() if pod.name.startswith(prefix)}

    async def close(self) -> None:
        for child in self.children.values():
            child.poll()
        self.imports.runs()


def _recorded() -> Iterator[Pod]:
    """This user's pods, by their records."""
    records: list[Path] = []
    for base in temp_root().glob("uvcc-*"):  # where others make and remove folders of their own meanwhile
        with contextlib.suppress(OSError):
            records += base.glob("p*r*.pod")
    for record in sorted(records):
        try:
            mine = record.stat().st_uid == os.getuid()
            pod = Pod(**json_of(record.read_text())) if mine else None
        except (OSError, ValueError, TypeError):
            continue  # ended meanwhile, or not a pod's record
        if pod is not None:
            yield pod


def _record(home: Path) -> Path:
    return home.with_suffix(".pod")


def _ready(home: Path) -> dict[str, Any] | None:
    try:
        found = json_of(home.with_suffix(".ready").read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _lives(ready: Mapping[str, Any]) -> bool:
    who = procs.LocalProcess(int(ready["pid"]), int(ready["starttime"]))
    return ready.get("boot_id") == procs.boot_id() and procs.alive(who)


def _addressed(pod: Pod, ready: Mapping[str, Any]) -> Pod:
    at = {"user": podhome.USER, "host": "127.0.0.1", "port": int(ready["port"])}
    return Pod(**{**asdict(pod), **at, "host_key": str(ready.get("host_key", ""))})


def _make_home(base: Path, home: Path) -> None:
    """Make the pod's home; a pod of the same run that ends just then may take the run's empty folder along."""
    for last in (False, False, True):
        try:
            claim_folder(base)
            return home.mkdir(mode=0o700)
        except (FileNotFoundError, FileExistsError):  # gone after mkdir found it, or before it was looked at
            if last:
                raise


def claim_folder(base: Path) -> None:
    """Create the run's folder; refuse one that another user put there first."""
    base.mkdir(mode=0o700, exist_ok=True)
    found = base.lstat()
    if base.is_symlink() or found.st_uid != os.getuid():
        raise PermissionError(f"{base} belongs to another user")


def _end(home: Path) -> set[int]:
    """End the pod and all it started, remove its files; returns the pids that would not end."""
    ready = _ready(home)
    if ready and _lives(ready):
        pod = procs.LocalProcess(int(ready["pid"]), int(ready["starttime"]))
        procs.stop_all(lambda: {pod.pid} if procs.alive(pod) else set(), grace_s=6.0, limit_s=8.0)
    left = podhome.clean_up(home)  # whatever a killed or frozen pod left behind, the pod itself included
    if not left:
        podhome.remove_files(home)
    return left


def _tail(home: Path) -> str:
    try:
        lines = home.with_suffix(".log").read_text(errors="replace").strip().splitlines()
    except OSError:
        return "no log"
    return lines[-1] if lines else "no output"


KIND = ProviderKind("local", FleetSettings, make, here=True, consents=False, volumes=GIVEN)
