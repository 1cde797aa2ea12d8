"""Entering a phase in a public transparency log with Rekor's interface: its policy before the first step, its run root
after it was verified. :mod:`uvcc_engine.transcript.proof.public_log` says what such entries show, and checks them.

Only hashes leave this machine, under the collector's signature. What the log answers is checked before it is kept, with
the log's key where the profile names it, else with the one that the log itself gives out; whose key is right, an
auditor brings along (``uvcc verify --log-key``).
"""

from __future__ import annotations

import asyncio
import base64
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from uvcc_console.report import collector
from uvcc_engine.contract.errors import ConfigError, UnreachableError, UnreadableError, UvccError, VerificationError
from uvcc_engine.contract.machine import host_names
from uvcc_engine.contract.run_files.files import write_atomic
from uvcc_engine.transcript.formats import reading
from uvcc_engine.transcript.proof import public_log as entries
from uvcc_engine.transcript.proof.bundle import NAME, POLICY_FILE, read_bundle
from uvcc_engine.transcript.signing import sshsig
from uvcc_engine.transcript.terms.policy import Policy

_ENTRIES: Final = "/api/v1/log/entries"
_PROOF: Final = "/api/v1/log/proof"
_KEY: Final = "/api/v1/log/publicKey"
_WAIT_S: Final = 60.0  # for one whole exchange, however slowly it drips
_CLOCK_S: Final = 600  # how far the log's clock may be from this machine's
_UUID: Final = re.compile("[0-9a-f]{64}|[0-9a-f]{80}")
_HINT: Final = "try again later, or name another log"


@dataclass(frozen=True, slots=True)
class PublicLog:
    """A log. ``key_file``: its public key (PEM), "" for the one that it gives out; ``clock``: seconds since 1970."""

    url: str
    key_file: str = ""
    wait_s: float = _WAIT_S
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.password:
            raise ConfigError(
                f"no transparency log: {reading.shown(self.url, 100)!r}", "write https://host, no password"
            )

    async def enter_policy(self, folder: Path) -> Path:
        """Enter the policy in a phase's folder; what the log answered lies beside it. An entry that is there stays.

        Raises UnreachableError if the log does not answer with an entry of this very policy; VerificationError for an
        answer that does not hold.
        """
        path = folder / entries.POLICY_ENTRY
        if not path.exists():
            policy = Policy.load(folder / POLICY_FILE)
            async with self._session() as session:
                entry, _ = await session.enter(entries.policy_text(policy.hash.hex()), entries.POLICY_ENTRY)
            _write(path, entries.spelled(entry))
        return path

    async def enter_run(self, folder: Path) -> Path:
        """Enter the run root of the bundle in a phase's folder, with the proof that the log only grew meanwhile.

        Raises as :meth:`enter_policy` does, and UnreadableError where the policy was never entered.
        """
        path = folder / entries.RUN_ENTRY
        if not path.exists():
            bundle = read_bundle(folder / NAME, lambda policy: True)  # of a phase that was verified
            policy_hash = bundle.policy.hash.hex()
            before, _ = entries.read_entry(folder / entries.POLICY_ENTRY)
            async with self._session() as session:
                first = entries.check_entry(
                    before, entries.policy_text(policy_hash), session.key, entries.POLICY_ENTRY
                ).head
                text = entries.run_text(policy_hash, bundle.run_root)
                entry, entered = await session.enter(text, entries.RUN_ENTRY)
                grown = await session.growth(first, entered.head)
            entries.check_growth(first, entered.head, [bytes.fromhex(h) for h in grown], entries.RUN_ENTRY)
            _write(path, entries.spelled(entry, grown))
        return path

    def _session(self) -> _Session:
        return _Session(self)


class _Session:
    """Some exchanges with a log, under one deadline."""

    key: entries.LogKey

    def __init__(self, log: PublicLog) -> None:
        self._log = log
        self._http = httpx.AsyncClient(timeout=log.wait_s, trust_env=False)
        self._end = asyncio.timeout(log.wait_s)

    async def __aenter__(self) -> _Session:
        await self._end.__aenter__()
        try:
            if self._log.key_file:
                path = Path(self._log.key_file).expanduser()
                self.key = entries.LogKey.from_pem(reading.read_file(path, named=True), str(path))
            else:
                _, pem, _ = await self._ask("GET", _KEY)
                self.key = entries.LogKey.from_pem(pem, f"the key of {self._log.url}")
        except BaseException as e:
            await self.__aexit__(type(e), e, e.__traceback__)
            raise
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        await self._http.aclose()
        try:
            await self._end.__aexit__(kind, error, trace)
        except TimeoutError as e:
            what = f"the log {self._log.url} did not answer within {self._log.wait_s:g} s"
            raise UnreachableError(what, _HINT) from e

    async def enter(self, text: bytes, what: str) -> tuple[dict[str, Any], entries.Entered]:
        """Enter a text; the log's answer, and what it shows. One that was entered before is fetched."""
        private = collector.private_key()
        raw = private.public_key().public_bytes_raw()
        armored = sshsig.sign(private, raw, entries.NAMESPACE, text)
        signature = {
            "content": _base64(armored.encode()),
            "format": "ssh",
            "publicKey": {"content": _base64(f"{sshsig.public_line(raw)}\n".encode())},
        }
        spec = {"data": {"content": _base64(text)}, "signature": signature}
        proposed = {"apiVersion": entries.VERSION, "kind": entries.KIND, "spec": spec}
        status, body, where = await self._ask("POST", _ENTRIES, json=proposed, good=(201, 409))
        if status == 409:  # an earlier try, whose answer was lost
            uuid = where.rpartition("/")[2]
            if not _UUID.fullmatch(uuid):
                raise UnreachableError(f"the log {self._log.url} has this entry and does not say where", _HINT)
            _, body, _ = await self._ask("GET", f"{_ENTRIES}/{uuid}")
        answers = reading.parse_json(body, f"the answer of {self._log.url}")
        if not isinstance(answers, dict) or len(answers) != 1:
            raise UnreadableError(f"the answer of {self._log.url} is not one entry", _HINT)
        entry = entries.entry_of(next(iter(answers.values())), f"the answer of {self._log.url}")
        entered = entries.check_entry(entry, text, self.key, what)
        away = entered.at - self._log.clock()
        if status != 409 and abs(away) > _CLOCK_S:
            said = f"the log dates {what} {abs(away):.0f} s {'after' if away > 0 else 'before'} this machine's clock"
            raise VerificationError("public log", said, "set this machine's clock, or name another log")
        if entered.signer != sshsig.public_line(raw):
            raise VerificationError("public log", f"{what} is not this installation's entry", _HINT)
        return entry, entered

    async def growth(self, first: entries.TreeHead, last: entries.TreeHead) -> list[str]:
        """The proof that one head is a beginning of the other."""
        params: dict[str, Any] = {"firstSize": first.size, "lastSize": last.size}
        if tree := re.search(" - ([0-9]{1,30})$", last.origin):
            params["treeID"] = tree[1]
        _, body, _ = await self._ask("GET", _PROOF, params=params)
        what = f"the proof of {self._log.url}"
        found = reading.parse_json(body, what)
        return [h.hex() for h in entries.siblings(found.get("hashes") if isinstance(found, dict) else None, what)]

    async def _ask(
        self,
        method: str,
        path: str,
        *,
        json: Mapping[str, Any] | None = None,
        params: Mapping[str, Any] | None = None,
        good: tuple[int, ...] = (200,),
    ) -> tuple[int, bytes, str]:
        url, body = f"{self._log.url.rstrip('/')}{path}", b""
        accepts = {"Accept": "application/x-pem-file" if path == _KEY else "application/json"}
        try:
            async with self._http.stream(method, url, json=json, params=params, headers=accepts) as response:
                async for chunk in response.aiter_bytes():
                    body += chunk
                    if len(body) > entries.LARGEST:
                        raise UnreachableError(f"the log {self._log.url} sends more than an entry", _HINT)
        except httpx.HTTPError as e:
            said = host_names.why(e, self._log.url)
            raise UnreachableError(f"the log {self._log.url} does not answer: {said:.200}", _HINT) from e
        if response.status_code not in good:
            raise UnreachableError(f"the log {self._log.url} answers {response.status_code} to {path}", _HINT)
        return response.status_code, body, response.headers.get("location", "")


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _write(path: Path, data: bytes) -> None:
    try:
        write_atomic(path, data)
    except OSError as e:
        raise UvccError(f"cannot write {path}: {e.strerror}", "free disk space and repeat") from e
