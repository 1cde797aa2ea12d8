"""A Slurm cluster of one node on 127.0.0.1, from Debian's packages: munged, slurmctld, slurmd of its own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from uvcc_engine.contract.machine.free_ports import ports

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "sinfo", "scancel")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin"


def why_not() -> str:
    """Why no cluster can be run here; empty where one can."""
    missing = [tool for tool in TOOLS if shutil.which(tool, path=_PATH) is None]
    return f"no {missing[0]} on this machine" if missing else "" if os.getuid() == 0 else "slurmd wants root"


class Cluster:
    """``with Cluster(folder) as c``: ``c.conf`` for ``SLURM_CONF``. Ends its own processes and no other."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.conf = folder, folder / "slurm.conf"
        self._pids: list[Path] = []

    def _start(self, tool: str, *args: str) -> None:
        path = shutil.which(tool, path=_PATH)
        subprocess.run([str(path), *args], env={**os.environ, "SLURM_CONF": str(self.conf)}, check=True, timeout=500)
        self._pids.append(self.folder / f"{tool}.pid")

    def __enter__(self) -> Cluster:
        at = self.folder
        for name in ("state", "spool"):
            (at / name).mkdir()
        at.chmod(0o755)
        (at / "key").write_bytes(os.urandom(128))
        (at / "key").chmod(0o400)
        lines = {
            "ClusterName": "uvcc",
            "SlurmctldHost": "localhost(127.0.0.1)",
            "SlurmctldPort": ports(1)[0],
            "SlurmdPort": ports(1)[0],
            "AuthInfo": f"socket={at}/munge",
            "SlurmUser": "root",
            "StateSaveLocation": at / "state",
            "SlurmdSpoolDir": at / "spool",
            "SlurmctldPidFile": at / "slurmctld.pid",
            "SlurmdPidFile": at / "slurmd.pid",
            "SlurmctldLogFile": at / "slurmctld.log",
            "SlurmdLogFile": at / "slurmd.log",
            "ProctrackType": "proctrack/pgid",
            "TaskPlugin": "task/none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core",
            "ReturnToService": 2,
            "KillWait": 5,
            "GresTypes": "gpu",
        }
        text = "".join(f"{k}={v}\n" for k, v in lines.items())
        text += f"NodeName=localhost NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 CPUs=1 Gres=gpu:fake:2\n"
        text += "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:2\n"
        text += "PartitionName=short Nodes=ALL MaxTime=5 State=UP OverSubscribe=FORCE:2\n"
        (at / "gres.conf").write_text("".join(f"Name=gpu Type=fake File=/dev/{it}\n" for it in ("null", "zero")))
        self.conf.write_text(text)
        munge = [f"--socket={at}/munge", f"--key-file={at}/key", f"--pid-file={at}/munged.pid"]
        self._start("munged", "--force", *munge, f"--log-file={at}/munged.log", f"--seed-file={at}/seed")
        self._start("slurmctld", "-f", str(self.conf))
        self._start("slurmd", "-f", str(self.conf), "-N", "localhost")
        end = time.monotonic() + 300.0
        while "idle" not in self.do("sinfo", "-h", "-o", "%T"):
            assert time.monotonic() < end, (at / "slurmctld.log").read_text()[-2000:]
            time.sleep(0.2)
        return self

    def do(self, *argv: str) -> str:
        env = {**os.environ, "SLURM_CONF": str(self.conf)}
        return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=500).stdout

    def __exit__(self, *exc: object) -> None:
        self.do("scancel", "--me")
        end = time.monotonic() + 10.0
        while self.do("squeue", "-h").strip() and time.monotonic() < end:
            time.sleep(0.2)
        for path in reversed(self._pids):
            if path.exists():
                os.kill(int(path.read_text()), signal.SIGTERM)
