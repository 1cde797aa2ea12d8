"""What pods do to files, addresses and themselves: each row ends named, the old file whole, no success claimed."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import asyncssh
import pytest

from uvcc_engine.contract.errors import UnreachableError, UvccError, VerificationError

BIG = bytes(range(256)) * 8000


async def answer(process: asyncssh.SSHServerProcess) -> None:
    process.stdout.write(b"done\n")
    process.exit(0)


class Dropping(asyncssh.SFTPServer):
    """Cuts the connection in the middle of a file."""

    def write(self, file_obj: object, offset: int, data: bytes) -> int:
        super().write(file_obj, offset, data[: len(data) // 2])
        self.channel.get_connection().abort()
        return len(data)


class Full(asyncssh.SFTPServer):
    """Has room for half of it."""

    def write(self, file_obj: object, offset: int, data: bytes) -> int:
        super().write(file_obj, offset, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("sftp", "kind", "text"),
    [
        (Dropping, UnreachableError, "is lost"),
        (Full, UvccError, "No space left on device"),
        (False, UvccError, "no further session|file transfer failed"),  # no such subsystem
    ],
)
async def test_a_transfer_that_breaks_off_is_an_error_and_the_old_file_stays_whole(
    ssh_fake: Callable,
    link_to: Callable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sftp: object,
    kind: type,
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)  # the SFTP server of this process serves its working folder
    (tmp_path / "blob").write_bytes(b"old")
    host = await ssh_fake(answer, sftp=sftp)
    link = link_to(host.address)
    with pytest.raises(kind, match=text) as caught:
        await link.put(BIG, "blob")
    assert caught.value.hint
    assert (tmp_path / "blob").read_bytes() == b"old"
    await host.stop()
    whole = await ssh_fake(answer, port=host.port, host_key=host.host_key)
    await link.put(BIG, "blob")  # again, once the pod behaves
    assert (tmp_path / "blob").read_bytes() == BIG
    assert len(whole.connections) == 1


@pytest.mark.parametrize("command", ["rm -rf runs", "echo hello"])
async def test_another_pod_at_a_dead_pods_address_gets_no_command(
    ssh_fake: Callable, link_to: Callable, command: str
) -> None:
    dead = await ssh_fake(answer)
    link = link_to(dead.address)
    assert await link.sh("true") == "done"
    await dead.stop()
    other = await ssh_fake(answer, port=dead.port)  # takes the same key: a pod of the same operator
    with pytest.raises(VerificationError, match="another host key"):
        await link.run(command)
    assert other.commands == []


async def test_a_pod_that_was_restarted_from_its_image_is_not_taken_for_the_old_one(
    ssh_fake: Callable, link_to: Callable
) -> None:
    pod = await ssh_fake(answer)
    before = link_to(pod.address)
    await before.connect()
    pinned = before.host_key
    await before.close()
    await pod.stop()
    again = await ssh_fake(answer, port=pod.port)  # auto-restart: new host key, nothing of the run left
    after = link_to(pod.address, host_key=pinned)  # another console, with the pin from the journal
    with pytest.raises(VerificationError, match="another host key") as refused:
        await after.connect_until(150.0)
    assert refused.value.hint
    assert again.commands == []
