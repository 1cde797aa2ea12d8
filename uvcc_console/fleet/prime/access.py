"""Where a pod lets people in, out of everything that its description has been seen to contain. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from uvcc_console.fleet.cloud.vendor import SshTarget
from uvcc_console.fleet.prime.models import ApiPod

# the user that each provider's images come with, where it is known
_USERS = {
    "crusoecloud": "ubuntu",
    "lambdalabs": "ubuntu",
    "hyperstack": "ubuntu",
    "massedcompute": "ubuntu",
    "runpod": "root",
    "datacrunch": "root",
    "primecompute": "root",
}
_PORTS = {"datacrunch": (22, 1234)}


def _words(value: Any) -> list[str]:
    """Strings of a string, a list, or a list of tokens of one command; nulls and empties dropped."""
    if isinstance(value, str):
        return [value.strip()] if value.strip() else []
    if not isinstance(value, list):
        return []
    found = [v.strip() for v in value if isinstance(v, str) and v.strip()]
    return [" ".join(found)] if "-p" in found else found


def parse(connection: Any) -> SshTarget | None:
    """The first complete login in an ``sshConnection``: ``root@1.2.3.4 -p 22022``, ``u@h:2222``, lists, tokens."""
    for text in _words(connection):
        words = text.split()
        if words and words[0] == "ssh":
            words = words[1:]
        port, rest, it = 0, [], iter(words)
        for word in it:
            if word == "-p":
                port = _port(next(it, ""))
            elif word.startswith("-p") and word[2:].isdigit():
                port = _port(word[2:])
            elif not word.startswith("-"):
                rest.append(word)
        if len(rest) != 1 or rest[0].count("@") != 1:
            continue
        user, host = rest[0].split("@")
        if match := re.fullmatch(r"([^:\[\]]+):(\d+)", host):
            host, port = match[1], port or _port(match[2])
        if user and host:
            return SshTarget(user, host, port or 22)
    return None


def _port(text: str) -> int:
    return int(text) if text.isdigit() and 0 < int(text) < 65536 else 0


def _mapped(pod: ApiPod) -> int:
    """The outside port of SSH in the pod's port mapping; 0 if it names none."""
    for mapping in pod.prime_port_mapping:
        if mapping.used_by == "SSH" or "SSH" in mapping.description.upper() or mapping.internal == "22":
            return _port(mapping.external)
    return 0


def targets(pod: ApiPod) -> list[SshTarget]:
    """Logins to try, the most likely first, none twice."""

    def all_of() -> Iterator[SshTarget]:
        told = parse(pod.ssh_connection)
        hosts = [told.host] if told else []
        hosts += [h for h in _words(pod.ip) if h not in hosts]
        default = _USERS.get(pod.provider_type, "")
        users = [u for u in (told.user if told else "", default, "root", "ubuntu") if u]
        mapped = _mapped(pod)
        for host in hosts:
            ports = [told.port] if told and host == told.host else []
            ports += [mapped] if mapped else []
            ports += list(_PORTS.get(pod.provider_type, (22,)))
            for port in ports:
                for user in users:
                    yield SshTarget(user, host, port)

    return list(dict.fromkeys(all_of()))
