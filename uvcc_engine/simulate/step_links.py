"""How the workers of a rehearsed step meet: the other parties' over links of their own, and their sisters'.

Everything is on this machine, at ports that are free now.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.job.link_spec import LinkSpec
from uvcc_engine.contract.job.topology import PARTIES, Coord, Topology
from uvcc_engine.contract.machine.free_ports import ports
from uvcc_engine.relay import config as relay_config
from uvcc_engine.relay import server

HERE: Final = "127.0.0.1"
_SETTLES_S: Final = 120.0
_TRIES: Final = 100
_READY: Final = "serves.json"
_CONFIG: Final = "relay.json"


def direct(size: Topology) -> dict[Coord, LinkSpec]:
    """Each worker listens at a port of its own."""
    coords = list(size.coords())
    at = {c: f"{HERE}:{port}" for c, port in zip(coords, ports(len(coords)), strict=True)}

    def others(c: Coord) -> dict[str, str]:
        return {str(q): at[replace(c, party=q)] for q in range(PARTIES) if q != c.party}

    return {c: LinkSpec(kind="direct", listen=at[c], peers=others(c)) for c in coords}


def _place(c: Coord) -> str:
    """What the three workers at one place of the parties have in common: their group at the relay."""
    return f"r{c.replica}s{c.stage}t{c.tensor}"


def _token_file(folder: Path, c: Coord) -> Path:
    return folder / f"token_{c}"


def relay_files(folder: Path, size: Topology) -> None:
    """A relay's configuration, and each worker's token beside it."""
    tokens = {c: os.urandom(16).hex() for c in size.coords()}
    allowed = [{"party": c.party, "group": _place(c), "token": token} for c, token in tokens.items()]
    settings = {"db": "relay.db", "ready_file": _READY, "stream_listen": f"{HERE}:0", "credentials": allowed}
    written = {folder / _CONFIG: json.dumps(settings)} | {_token_file(folder, c): t for c, t in tokens.items()}
    for path, text in written.items():
        path.touch(mode=0o600)
        path.write_text(text)


def relayed(folder: Path, size: Topology, kind: str, relay: BaseProcess, without: str) -> dict[Coord, LinkSpec]:
    """Every worker's link over the relay, once that serves. Raises UvccError, with the hint ``without``, if it does not
    start."""
    at = _served_at(relay, folder / _READY, without)
    stream = str(at["stream"]) if kind == "stream" else ""
    common = LinkSpec(kind=kind, relay_url=str(at["url"]), stream=stream)
    return {c: replace(common, group=_place(c), token_file=str(_token_file(folder, c))) for c in size.coords()}


def _served_at(relay: BaseProcess, ready: Path, without: str) -> Mapping[str, Any]:
    limit = time.monotonic() + _SETTLES_S
    while not ready.exists():
        if not relay.is_alive() or time.monotonic() > limit:
            raise UvccError("the rehearsal's relay did not start", without)
        time.sleep(0.02)
    found: dict[str, Any] = json.loads(ready.read_text())
    return found


def end_with(line: Connection, folder: Path) -> None:
    """End this process when whoever forked it is gone, who says nothing more on the line. Who was killed leaves the
    folder to those that it forked."""

    def ended() -> None:
        with contextlib.suppress(EOFError, OSError):
            line.recv()
        remove(folder)
        os._exit(0)

    threading.Thread(target=ended, daemon=True).start()


def remove(folder: Path) -> None:
    """Remove a rehearsal's folder, which others may be removing, or this process's other threads still write to."""
    for _ in range(_TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return


def serve_relay(line: Connection, folder: Path) -> None:
    """In the relay's process: serve until whoever forked this is gone."""
    end_with(line, folder)
    server.run(relay_config.load(folder / _CONFIG))
