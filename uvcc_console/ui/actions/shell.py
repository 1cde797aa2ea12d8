"""A shell on a pod: the OpenSSH client with the run's own key and the host key that was pinned at first contact."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from uvcc_console.core.snapshot import PodView
from uvcc_console.fleet import tunnels
from uvcc_console.fleet.inventory import jump_to
from uvcc_engine.contract.errors import UnreadableError

KEY_FILE = "ssh_ed25519"
# a provider says where its pods are: nothing of it may be an option of ssh or a second line of known_hosts
_HOST = re.compile(r"\[?[A-Za-z0-9:][A-Za-z0-9.:%_-]*\]?")
_USER = re.compile(r"([A-Za-z0-9_][A-Za-z0-9._-]*)?")
_HOP = r"([A-Za-z0-9_][A-Za-z0-9._-]*@)?\[?[A-Za-z0-9:][A-Za-z0-9.:%_-]*\]?(:[0-9]{1,5})?"
_JUMP = re.compile(rf"{_HOP}(,{_HOP}){{0,7}}")
_HOST_KEY = re.compile(r"[a-z0-9@.-]+ [A-Za-z0-9+/=]+")


def _key(run_dir: Path, profile: Mapping[str, Any]) -> Path:
    fleet = profile.get("fleet")
    given = str(fleet.get("ssh_key", "")) if isinstance(fleet, Mapping) else ""
    return Path(given).expanduser() if given else run_dir / KEY_FILE


@contextmanager
def ssh_command(pod: PodView, run_dir: Path, profile: Mapping[str, Any]) -> Iterator[list[str]]:
    """The command line; its known-hosts file lives as long as the context. Raises UnreadableError."""
    user, _, where = pod.address.rpartition("@")
    host, _, port = where.rpartition(":")
    if not _HOST.fullmatch(host) or not _USER.fullmatch(user) or not port.isdecimal() or not port.isascii():
        raise UnreadableError(f"pod {pod.pod} has no address that ssh may be given", "it was never reached")
    if not _HOST_KEY.fullmatch(pod.host_key):
        raise UnreadableError(f"pod {pod.pod} has no address or no pinned host key", "it was never reached")
    way = jump_to(fleet, pod.address) if isinstance(fleet := profile.get("fleet"), Mapping) else ""
    tunnel = tunnels.command(way) if tunnels.kind_of(way) else ""
    if way and not tunnel and not _JUMP.fullmatch(way):
        raise UnreadableError(f"pod {pod.pod} has a jump host that ssh may not be given", "see the hosts file")
    key = _key(run_dir, profile)
    if not key.exists():
        raise UnreadableError(f"no SSH key at {key}", "it is made when the run is provisioned")
    with tempfile.TemporaryDirectory(prefix="uvcc-shell-") as folder:
        known = Path(folder) / "known_hosts"
        known.write_text(f"[{host}]:{port} {pod.host_key}\n{host} {pod.host_key}\n")
        yield [
            "ssh",
            "-t",
            "-i",
            str(key),
            "-p",
            port,
            "-o",
            "IdentitiesOnly=yes",
            "-o",
            "StrictHostKeyChecking=yes",
            "-o",
            f"UserKnownHostsFile={known}",
            *(["-o", f"ProxyCommand={tunnel}"] if tunnel else []),
            *(["-J", way] if way and not tunnel else []),  # the jump host's own keys and known_hosts are the operator's
            f"{user}@{host}" if user else host,
        ]
