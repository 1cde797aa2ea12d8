"""Two machines with a cable between them: network namespaces of this one, and a recorder of what crosses."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ADDRESSES = ("10.77.0.1", "10.77.0.2")
CABLE = ("cable0", "cable1")
_CLONE_NEWNET = 0x40000000
_EVERY_PROTOCOL = 3
_IPV4, _TCP = 0x0800, 6
_LIBC = ctypes.CDLL(None, use_errno=True)


def enter(pid: int) -> None:
    """Move this thread, or a process of one thread, into another process' network."""
    with open(f"/proc/{pid}/ns/net") as other:
        if _LIBC.setns(other.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")


class Machines:
    """Two of them; ``within`` runs a command on one, ``enter`` moves a forked process there."""

    def __init__(self) -> None:
        self._holders = [subprocess.Popen(["unshare", "-n", "cat"], stdin=subprocess.PIPE) for _ in ADDRESSES]
        own = os.readlink("/proc/self/ns/net")
        end = time.monotonic() + 120.0
        for holder in self._holders:
            while os.readlink(f"/proc/{holder.pid}/ns/net") == own:
                if holder.poll() is not None or time.monotonic() > end:
                    raise OSError("no network of its own")
                threading.Event().wait(0.01)
        self._ip(
            0, "link", "add", CABLE[0], "type", "veth", "peer", "name", CABLE[1], "netns", str(self._holders[1].pid)
        )
        for k, address in enumerate(ADDRESSES):
            self._ip(k, "link", "set", "lo", "up")
            self._ip(k, "addr", "add", f"{address}/24", "dev", CABLE[k])
            self._ip(k, "link", "set", CABLE[k], "up")

    def within(self, k: int) -> list[str]:
        return ["nsenter", "-t", str(self._holders[k].pid), "-n"]

    def enter(self, k: int) -> None:
        enter(self._holders[k].pid)

    def _ip(self, k: int, *args: str) -> None:
        subprocess.run([*self.within(k), "ip", *args], check=True, capture_output=True)

    def close(self) -> None:
        for holder in self._holders:
            holder.kill()
            holder.wait()

    @contextlib.contextmanager
    def recorded(self, k: int, device: str) -> Iterator[list[bytes]]:
        """Packets that a device of a machine sends and receives from now on; complete once the context is left."""
        packets: list[bytes] = []
        listens, over = threading.Event(), threading.Event()

        def record() -> None:
            self.enter(k)
            with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_EVERY_PROTOCOL)) as sock:
                sock.setsockopt(socket.SOL_SOCKET, getattr(socket, "SO_RCVBUFFORCE", 33), 1 << 28)
                sock.bind((device, 0))
                sock.settimeout(0.2)
                listens.set()
                while True:
                    try:
                        packets.append(sock.recv(1 << 18))
                    except TimeoutError:
                        if over.is_set():
                            return

        thread = threading.Thread(target=record, daemon=True)
        thread.start()
        assert listens.wait(120.0)
        try:
            yield packets
        finally:
            over.set()
            thread.join(120.0)


@contextlib.contextmanager
def two_machines() -> Iterator[Machines]:
    """Skips the test where this machine does not allow them: they take root."""
    if not hasattr(socket, "AF_PACKET") or os.geteuid() != 0 or not Path("/proc/self/ns/net").exists():
        pytest.skip("networks of their own take root on Linux")
    try:
        machines = Machines()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this machine gives no networks of their own: {error}")
    try:
        yield machines
    finally:
        machines.close()


def streams(packets: list[bytes]) -> list[bytes]:
    """What each TCP connection carried each way, put together from its packets."""
    flows: dict[bytes, dict[int, bytes]] = {}
    for packet in packets:
        if int.from_bytes(packet[12:14], "big") != _IPV4 or packet[23] != _TCP:
            continue
        at = 14 + 4 * (packet[14] & 15)
        end = 14 + int.from_bytes(packet[16:18], "big")
        payload = packet[at + 4 * (packet[at + 12] >> 4) : end if end > at else len(packet)]
        if payload:
            flow = packet[26:34] + packet[at : at + 4]
            flows.setdefault(flow, {})[int.from_bytes(packet[at + 4 : at + 8], "big")] = payload
    return [b"".join(part for _, part in sorted(flow.items())) for flow in flows.values()]


def found_in(words: list[bytes], carried: list[bytes]) -> int:
    """How many of the words stand somewhere in what was carried."""
    return sum(any(word in stream for stream in carried) for word in words)
