"""OpenSSH ``allowed_signers`` files, decided as ``ssh-keygen -Y verify`` decides them.

A line is ``PRINCIPALS [OPTIONS] KEY [COMMENT]``: principals are patterns separated by commas (``*``, ``?``, ``!`` in
front excludes), the options ``namespaces="..."``, ``valid-after=``, ``valid-before=``. Unlike ssh-keygen, which passes
over a line that it cannot read, a malformed line makes the file unreadable: a pin that is silently ignored is none.
Certificates are not used here, so ``cert-authority`` is refused by name.
"""

from __future__ import annotations

import base64
import binascii
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from uvcc_engine.contract.errors import UnreadableError
from uvcc_engine.transcript.formats import reading
from uvcc_engine.transcript.signing import sshsig

_TIME: Final = re.compile(r"(\d{8})(\d{4}(?:\d{2})?)?(Z|UTC)?", re.ASCII)
_KEY_TYPE: Final = re.compile(r"[a-z0-9@.-]+")
_LEFT_OUT: Final = 'write: P0 namespaces="..." ssh-ed25519 AAAA'


@dataclass(frozen=True, slots=True)
class Signer:
    """One line. ``key``: an OpenSSH Ed25519 line, or "" for a key of another kind, which signs nothing here."""

    principals: str
    key: str
    namespaces: str | None = None
    valid_after: int = 0
    valid_before: int = 0
    line: int = 0

    def refusal(self, namespace: str, now: float) -> str:
        """Why this line does not let its key sign under ``namespace`` now; "" if it does."""
        if self.namespaces is not None and not matches(namespace, self.namespaces):
            return f"line {self.line} does not permit the namespace {namespace}"
        if self.valid_after and now < self.valid_after:
            return f"line {self.line} is not valid before {_shown_time(self.valid_after)}"
        if self.valid_before and now > self.valid_before:
            return f"line {self.line} is not valid after {_shown_time(self.valid_before)}"
        return ""


@dataclass(frozen=True, slots=True)
class AllowedSigners:
    """Who may sign what. ``source`` names the file, for messages."""

    signers: tuple[Signer, ...]
    source: str = "the allowed signers"

    @classmethod
    def of(cls, pins: Mapping[str, str], source: str = "the allowed signers") -> AllowedSigners:
        """One key for each principal, in every namespace and at any time."""
        return cls(tuple(Signer(who, key) for who, key in pins.items()), source)

    def of_principal(self, who: str) -> tuple[Signer, ...]:
        """The lines that name somebody."""
        return tuple(s for s in self.signers if matches(who, s.principals))

    def refusal(self, who: str, key: str, namespaces: Sequence[str], now: float | None = None) -> str:
        """Why ``key`` may not sign as ``who`` under each of these namespaces; "" if it may."""
        at = time.time() if now is None else now
        named = self.of_principal(who)
        if not named:
            return f"{self.source} do not name {who}"
        lines = [s for s in named if s.key == key]
        if not lines:
            keys = ", ".join(sorted({s.key or "a key of another kind" for s in named}))
            return f"{who} is {key} here, {keys} in {self.source}"
        for namespace in namespaces:
            why = [s.refusal(namespace, at) for s in lines]
            if all(why):
                return f"{self.source} name {who}, but {'; '.join(why)}"
        return ""


def read_allowed_signers(path: Path) -> AllowedSigners:
    """Read a file that the caller named. Raises UnreadableError naming the first line that is not as it must be."""
    text = reading.read_text(path, named=True)
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        line = line.strip(" \t\r")
        if line and not line.startswith("#"):
            found.append(_line(f"{reading.shown(path)}:{number}", number, line))
    return AllowedSigners(tuple(found), f"the allowed signers {reading.shown(path)}")


def _line(where: str, number: int, line: str) -> Signer:
    principals, rest = _principals(where, line)
    options: dict[str, str] = {}
    key = _key(where, rest)
    if key is None:
        end = _end_of_options(where, rest)
        options = _options(where, rest[:end])
        key = _key(where, rest[end:].lstrip(" \t"))
        if key is None:
            raise UnreadableError(f"{where} is not an allowed signer", _LEFT_OUT)
    after = _time(where, "valid-after", options)
    before = _time(where, "valid-before", options)
    if after and before and after >= before:
        raise UnreadableError(f"{where}: valid-before is not after valid-after")
    return Signer(principals, key, options.get("namespaces"), after, before, number)


def _principals(where: str, line: str) -> tuple[str, str]:
    """The first word, which may stand in double quotes, and what follows it."""
    if line.startswith('"'):
        first, quote, rest = line[1:].partition('"')
        if not quote or not rest.startswith((" ", "\t")):
            raise UnreadableError(f"{where}: the principals' quotation does not end", _LEFT_OUT)
        return first, rest.lstrip(" \t")
    words = re.split(r"[ \t]+", line, maxsplit=1)
    if len(words) != 2:
        raise UnreadableError(f"{where} is not an allowed signer", _LEFT_OUT)
    return words[0], words[1]


def _key(where: str, text: str) -> str | None:
    """The key that ``text`` begins with: "" for one of another kind than Ed25519; None if there is none."""
    words = re.split(r"[ \t]+", text, maxsplit=2)
    if len(words) < 2 or not _KEY_TYPE.fullmatch(words[0]):
        return None
    try:
        blob = base64.b64decode(words[1], validate=True)
    except (binascii.Error, ValueError):
        return None
    kind = words[0].encode()
    if blob[:4] != len(kind).to_bytes(4, "big") or blob[4 : 4 + len(kind)] != kind:
        return None
    if words[0] != "ssh-ed25519":
        return ""
    line = f"{words[0]} {words[1]}"
    try:
        sshsig.public_raw(line)
    except UnreadableError as e:
        raise UnreadableError(f"{where}: {e.what}", e.hint) from e
    return line


def _end_of_options(where: str, text: str) -> int:
    """Where the options end: at the first blank outside quotation marks."""
    quoted, at = False, 0
    while at < len(text) and (quoted or text[at] not in " \t"):
        if text[at] == "\\" and text[at + 1 : at + 2] == '"':
            at += 1
        elif text[at] == '"':
            quoted = not quoted
        at += 1
    if quoted:
        raise UnreadableError(f"{where}: a quotation in the options does not end", _LEFT_OUT)
    return at


def _options(where: str, text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    while text:
        name, equals, rest = text.partition("=")
        name = name.lower()
        if re.match(r"cert-authority(?:,|$)", text, re.IGNORECASE):
            raise UnreadableError(f"{where}: cert-authority: certificates are not used here", "name the key itself")
        if not equals or name not in ("namespaces", "valid-after", "valid-before"):
            raise UnreadableError(f"{where}: unknown option {reading.shown(text, 60)!r}", _LEFT_OUT)
        if name in found:
            raise UnreadableError(f"{where}: {name} is given twice", "keep one of them")
        found[name], text = _quoted(where, name, rest)
        if text:
            if not text.startswith(",") or text == ",":
                raise UnreadableError(f"{where}: {reading.shown(text, 60)!r} follows {name}", _LEFT_OUT)
            text = text[1:]
    return found


def _quoted(where: str, name: str, text: str) -> tuple[str, str]:
    value, at = "", 1
    while text.startswith('"') and at < len(text):
        if text[at] == '"':
            return value, text[at + 1 :]
        if text[at] == "\\" and text[at + 1 : at + 2] == '"':
            at += 1
        value, at = value + text[at], at + 1
    raise UnreadableError(f"{where}: the value of {name} must stand in quotation marks", f'write: {name}="..."')


def _time(where: str, name: str, options: Mapping[str, str]) -> int:
    """Seconds since 1970 of YYYYMMDD[HHMM[SS]], local time unless Z or UTC follows; 0 if not given."""
    if name not in options:
        return 0
    found = _TIME.fullmatch(options[name])
    try:
        if found is None:
            raise ValueError("not YYYYMMDD[HHMM[SS]][Z]")
        day, hour, utc = found[1], (found[2] or "0000").ljust(6, "0"), found[3]
        parts = time.strptime(day + hour, "%Y%m%d%H%M%S")
        seconds = int(_utc(parts) if utc else time.mktime(parts))
        if seconds <= 0:
            raise ValueError("before 1970")
    except (ValueError, OverflowError) as e:
        raise UnreadableError(f"{where}: {name}={reading.shown(options[name], 60)!r} is no time: {e}") from e
    return seconds


def _utc(parts: time.struct_time) -> int:
    import calendar

    return calendar.timegm(parts)


def _shown_time(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def matches(text: str, patterns: str) -> bool:
    """OpenSSH's match_pattern_list: some pattern matches and no excluding one does."""
    good = False
    for pattern in patterns.split(","):
        excluding = pattern.startswith("!")
        if _fits(text, pattern[1:] if excluding else pattern):
            if excluding:
                return False
            good = True
    return good


def _fits(text: str, pattern: str) -> bool:
    """``*`` and ``?`` as in a shell, in time proportional to both lengths' product whatever the pattern."""
    at = here = 0
    star, tried = -1, 0
    while at < len(text):
        if here < len(pattern) and pattern[here] == "*":
            star, tried, here = here, at, here + 1
        elif here < len(pattern) and pattern[here] in ("?", text[at]):
            at, here = at + 1, here + 1
        elif star >= 0:
            tried += 1
            at, here = tried, star + 1
        else:
            return False
    return not pattern[here:].strip("*")


def each_key(signers: AllowedSigners, who: str) -> Iterator[str]:
    """The Ed25519 keys of a principal, each once."""
    return iter(dict.fromkeys(s.key for s in signers.of_principal(who) if s.key))
