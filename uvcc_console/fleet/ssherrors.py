"""What a failed SSH operation means to the operator: the thing is named, with what to do about it."""

from __future__ import annotations

import asyncio
import socket

import asyncssh

from uvcc_console.fleet.pins import split_address
from uvcc_engine.contract.errors import UnreachableError, UvccError, VerificationError
from uvcc_engine.contract.machine import host_names

REACHED = "set MaxSessions 10 in its sshd_config and reload sshd"


class HostKeyChanged(VerificationError):
    """A machine shows another host key than the pinned one. Both are named by their SHA-256 fingerprints."""

    def __init__(self, what: str, hint: str, *, expected: str, seen: str) -> None:
        super().__init__("host_key", what, hint)
        self.expected = expected
        self.seen = seen


def place_of(pod: str, address: str) -> str:
    """A pod and where it is; of a host that no pod has a claim on yet, and is called by its address, that once."""
    return f"host {address}" if pod == address else f"pod {pod} at {address}"


def classify(error: BaseException, pod: str, address: str) -> UvccError:
    """The error that says what a failed SSH operation means."""
    where = place_of(pod, address)
    if isinstance(error, UvccError):
        return error
    if isinstance(error, asyncssh.PermissionDenied):
        return UnreachableError(f"{where} refuses the key of this run", "is the key installed, and the user right?")
    if isinstance(error, asyncssh.HostKeyNotVerifiable):
        return VerificationError("host_key", f"{where} cannot prove its host key", "do not use this pod")
    if isinstance(error, asyncssh.ChannelOpenError):
        return UnreachableError(f"{where} opens no further session: {error.reason}", "the link may be down; retry")
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return UnreachableError(f"{where} gave no answer in time", "the pod may be frozen or its network cut")
    if isinstance(error, ConnectionRefusedError):
        return UnreachableError(f"{where} refuses connections", "it may be booting, or its SSH server is down")
    if isinstance(error, socket.gaierror):
        return UnreachableError(f"{where} cannot be reached: {host_names.why(error, address)}")
    if isinstance(error, asyncssh.SFTPBadMessage):
        what = f"{where}: what answers for SFTP does not speak it: {error.reason}"
        return UvccError(what, "does the account run a forced command, or print text at every login?")
    if isinstance(error, asyncssh.SFTPError):
        return UvccError(f"{where}: file transfer failed: {error.reason}", "is its disk full or its home read-only?")
    return UnreachableError(f"{where} is lost: {error}", "its state is unknown until the link is back")


class JumpTurnedAwayError(ConnectionResetError):
    """A jump host ended a connection before it let anybody in, as a crowded one does: worth another try."""

    def __init__(self, hop: str, error: Exception) -> None:
        super().__init__(f"jump host {hop}: {error}")
        self.hop = hop


def of_jump_host(error: BaseException, hop: str, pod: str, address: str) -> UvccError:
    """The error that says why one does not get past a jump host: it is the user's own, and known by their own SSH."""
    user, host, port = split_address(hop)
    where = f"jump host {hop}, on the way to {place_of(pod, address)},"
    by_hand = f"ssh {f'-p {port} ' if port != 22 else ''}{f'{user}@' if user else ''}{host}"
    if isinstance(error, asyncssh.PermissionDenied):
        cure = f"{by_hand} must get in: ssh-add the key, or name it and the user in ~/.ssh/config"
        return UnreachableError(f"{where} refuses your keys", cure)
    if isinstance(error, asyncssh.HostKeyNotVerifiable):
        what = f"{where} shows a host key that is not the one in your ~/.ssh/known_hosts, or none is there"
        cure = f"compare it with whoever runs that host, then write it down: {by_hand}"
        return VerificationError("host_key", what, cure)
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return UnreachableError(
            f"{where} gave no answer in time", f"is it on, and its port {port} open to you? {by_hand}"
        )
    if isinstance(error, ConnectionRefusedError):
        return UnreachableError(f"{where} refuses connections", f"is its SSH server up, and on port {port}?")
    if isinstance(error, socket.gaierror):
        return UnreachableError(f"{where} cannot be reached: {host_names.why(error, host)}")
    return UnreachableError(f"{where} cannot be used: {error}", f"try it: {by_hand}")


def behind_jump_host(error: asyncssh.ChannelOpenError, hop: str, pod: str, address: str) -> UnreachableError:
    """A jump host let us in, and did not get through to the machine behind it."""
    what = f"jump host {hop} does not get through to {place_of(pod, address)}: {error.reason or 'it says not why'}"
    cure = "is that address right as seen from there, is the machine on, and does the jump host AllowTcpForwarding?"
    return UnreachableError(what, cure)


def sessions_full(pod: str, address: str) -> UnreachableError:
    """The server has let us in and opens no session more, although none of ours will end."""
    what = f"{place_of(pod, address)} opens no further session: its SSH server's MaxSessions is reached"
    return UnreachableError(what, REACHED)


def closed_before_login(pod: str, address: str, hop: str = "") -> UnreachableError:
    """The server, or the jump host before it, ends connections before it lets anybody in, again and again."""
    where = place_of(pod, address)
    where = f"jump host {hop}, on the way to {where}," if hop else where
    what = f"{where} closes connections before a login, as an SSH server does at its MaxStartups"
    return UnreachableError(what, "set MaxStartups 10:30:100 in its sshd_config; or somebody floods its port")


def own_keys_refused(pod: str, address: str, offered: str) -> UnreachableError:
    """A host of the user's own that takes none of their keys."""
    what = f"{place_of(pod, address)} refuses {offered}"
    return UnreachableError(what, "what works with ssh works here: ssh-add the key, or name it in ~/.ssh/config")


def no_login_by_key(pod: str, address: str, methods: list[str]) -> UnreachableError:
    """No key will do there."""
    what = f"{place_of(pod, address)} lets in by {' or '.join(methods)} only, not by a key"
    return UnreachableError(what, "set PubkeyAuthentication yes in its sshd_config, and authorize the key there")


def no_shell(pod: str, address: str, said: str) -> UvccError:
    """Whatever is asked for, something else answers."""
    what = f"{place_of(pod, address)} does not run what it is asked to, it answers {said[:80]!r}"
    return UvccError(
        what + ": the account runs a forced command, or has no plain shell",
        "remove command= from the key's line in authorized_keys (or ForceCommand in sshd_config), or name another user",
    )


def noisy_start_files(pod: str, address: str, said: str) -> UvccError:
    """The shell's start-up files write into every command's output."""
    what = f"{place_of(pod, address)} prints text of its own with every command: {said[:80]!r}"
    return UvccError(what, "make ~/.bashrc and the like silent where no terminal is attached")
