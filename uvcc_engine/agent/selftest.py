"""``uvcc-engine selftest``: what a pod needs, tried out for real in a few seconds."""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from uvcc_engine.agent import main as agent_main
from uvcc_engine.agent.socketpath import NAME as SOCKET
from uvcc_engine.agent.socketpath import connect
from uvcc_engine.contract import RunWriter
from uvcc_engine.contract.agent_protocol import wire
from uvcc_engine.contract.checkpoints import checkpoint
from uvcc_engine.contract.errors import UvccError, VerificationError
from uvcc_engine.contract.machine import torch_floor
from uvcc_engine.contract.machine.raising_parser import RaisingParser
from uvcc_engine.contract.run_files import files

MODULES: Final = (
    "torch",
    "numpy",
    "cryptography",
    "safetensors",
    "starlette",
    "uvicorn",
    "httpx",
    "google_crc32c",
    "blake3",
)
START_S: Final = 60.0


def main(argv: Sequence[str] | None = None) -> int:
    """Print one line per check; exit code 1 if one fails."""
    parser = RaisingParser(prog="uvcc-engine selftest", description="try out what a pod needs, attention included")
    parser.add_argument("--json", action="store_true", help="print one JSON array")
    parser.add_argument("--full", action="store_true", help="attention: many more edits, and a needle after a training")
    parser.add_argument("--device", default="", help="where attention is tried (cuda if there is one)")
    options = parser.parse_args(argv)
    rows = [_try(name, check) for name, check in CHECKS.items()]
    rows += _attention(options.device, full=options.full)
    if options.json:
        print(json.dumps(rows))
    else:
        for row in rows:
            print(f"{'ok  ' if row['ok'] else 'FAIL'}  {row['name']:<18}{row['seconds']:7.2f} s  {row['detail']}")
    return 0 if all(row["ok"] for row in rows) else 1


def _try(name: str, check: Callable[[], str]) -> dict[str, Any]:
    began = time.monotonic()
    try:
        ok, detail = True, check()
    except (UvccError, ImportError, OSError) as error:
        ok, detail = False, f"{type(error).__name__}: {error}"
    return {"name": name, "ok": ok, "seconds": round(time.monotonic() - began, 3), "detail": detail}


def _attention(device: str, *, full: bool) -> list[dict[str, Any]]:
    """The checks of Native Sparse Attention on this device."""
    try:
        torch = importlib.import_module("torch")
        nsa = importlib.import_module("uvcc_engine.nsa.selftest")
    except ImportError as error:
        return [{"name": "attention", "ok": False, "seconds": 0.0, "detail": str(error)}]
    checks = nsa.run(torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")), full=full)
    return [{"name": c.name, "ok": c.ok, "seconds": round(c.seconds, 3), "detail": c.detail} for c in checks]


def _modules() -> str:
    torch = importlib.import_module("torch")
    if torch_floor.is_old(torch.__version__):
        raise VerificationError("torch", torch_floor.what_is_old(torch.__version__), torch_floor.install_hint())
    found = [f"python {sys.version.split()[0]}"]
    found += [f"{n} {getattr(importlib.import_module(n), '__version__', '')}".rstrip() for n in MODULES]
    return ", ".join(found)


def _ring() -> str:
    """Shares live in Z_2^64, so int64 products must wrap."""
    torch = importlib.import_module("torch")
    a = torch.tensor([2**62 + 3], dtype=torch.int64)
    wanted = (2**62 + 3) * 5 % 2**64
    found = int((a * 5).item()) % 2**64
    if found != wanted:
        raise VerificationError("ring", f"int64 product is {found}, not {wanted}", "use another torch")
    return "int64 wraps"


def _contract() -> str:
    """A run directory and a checkpoint; a flipped byte must be found."""
    with tempfile.TemporaryDirectory() as folder:
        with RunWriter.open(Path(folder) / "run", run="selftest") as writer:
            writer.metrics(0, 1.0, 0.1, 0.0)
            writer.exit("done", step=1)
        root = Path(folder) / "run" / files.CHECKPOINTS
        made = checkpoint.save(root, run="selftest", step=1, topology={}, contents={"rank0.safetensors": b"\0" * 64})
        checkpoint.verify(made.path, made.sha256)
        (made.path / "rank0.safetensors").write_bytes(b"\0" * 63 + b"\1")
        try:
            checkpoint.verify(made.path)
        except VerificationError:
            return "run directory, checkpoint"
    raise VerificationError("checkpoint", "a flipped byte was not found", "reinstall the engine")


def _agent() -> str:
    """A real agent forks a real worker and stops."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "pod"
        read, write = os.pipe()
        before = os.dup(1)
        os.dup2(write, 1)
        try:
            agent_main.start(root, [], detach=True)
        finally:
            os.dup2(before, 1)
            for fd in (before, write, read):
                os.close(fd)
        spec = {"run": "selftest", "kind": "command", "coord": "p0r0s0t0", "argv": [sys.executable, "-c", "exit(7)"]}
        try:
            _launch_and_wait(root, spec)
        finally:
            agent_main.ask(root, {"op": wire.STOP, "nonce": "stop", "grace_s": 1}, timeout=START_S)
    return "forked, watched, stopped"


def _launch_and_wait(root: Path, spec: Mapping[str, Any]) -> None:
    with connect(root / SOCKET, START_S) as sock:
        launch = {"op": wire.LAUNCH, "nonce": "launch", "run": spec["run"], "workers": [spec]}
        sock.sendall(wire.encode({"op": wire.HELLO, "nonce": "hello"}) + wire.encode(launch))
        for line in sock.makefile("rb"):
            message = wire.decode(line)
            if message.get("ok") is False:
                raise UvccError(str(message.get("error")), str(message.get("hint")))
            if message["op"] == wire.PROC and message["state"] == "exited":
                if message["rc"] != 7:
                    raise VerificationError("agent", f"exit code {message['rc']} instead of 7")
                return


CHECKS: Final[Mapping[str, Callable[[], str]]] = {
    "agent": _agent,  # first: it forks, so nothing may have started threads
    "contract": _contract,
    "modules": _modules,
    "ring": _ring,
}
