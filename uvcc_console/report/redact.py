"""Refuse what must not leave: text shaped like shares, keys or tokens. Checked line by line, never quoted in an error.

A bundle that would hold such a line is not written at all: a reader of logs cannot tell a harmless random number from a
share, so neither is let through.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from uvcc_engine.contract.errors import UvccError

KEY, TOKEN, SHARE = "key-shaped", "token-shaped", "share-shaped"

_SIGNATURE: Final = re.compile(r"-----BEGIN SSH SIGNATURE-----.*?-----END SSH SIGNATURE-----")
_KEY: Final = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY|b3BlbnNzaC1rZXktdjE|PuTTY-User-Key-File|AGE-SECRET-KEY-1"
    r"|[\"']?(?:private[_-]?key|privkey|secret[_-]?key|seed_hex)[\"']?\s*[:=]\s*[\"']?[0-9A-Za-z+/=_-]{16,}",
    re.IGNORECASE,
)
_TOKEN: Final = re.compile(
    r"\bBearer\s+[A-Za-z0-9._~+/=-]{12,}|\bAuthorization\s*:\s*\S+"
    r"|\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{5,}"
    r"|\b(?:ghp|gho|ghs|glpat|hf|sk|pit|xox[abp])[_-][A-Za-z0-9_-]{16,}|\bAKIA[0-9A-Z]{16}\b"
    r"|[\"']?(?:[a-z0-9]+[_-])*(?:token|api[_-]?key|apikey|password|passwd|secret)[\"']?\s*[:=]\s*[\"']?[A-Za-z0-9._~+/=-]{12,}",
    re.IGNORECASE,
)
# text encodings of tensors: no hash, id, leaf or signature line is that long
_HEX: Final = re.compile(r"[0-9A-Fa-f]{129,}|(?:\\x[0-9a-f]{2}[^\\]{0,2}){32,}")
_BASE64: Final = re.compile(r"[A-Za-z0-9+/_-]{160,}")
_MIXED: Final = (re.compile(r"[a-z]"), re.compile(r"[A-Z]"), re.compile(r"[0-9]"))
_BIG: Final = re.compile(r"(?<![\w.])-?\d{16,20}(?![\w.])")
_BIG_LIMIT: Final = 4


@dataclass(frozen=True, slots=True)
class Finding:
    """Where something must not be: the file's name in the report, the line, and what it looks like."""

    name: str
    line: int
    shape: str


class RedactionError(UvccError):
    """Something that must stay on its pod was about to enter a report."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(
            f"{finding.name}:{finding.line} is {finding.shape}; the report was not written",
            f"look at that line on this machine; --exclude {finding.name} leaves the file out",
        )
        self.finding = finding


def shape_of(line: str) -> str:
    """What forbidden thing a line looks like; "" if none."""
    text = _SIGNATURE.sub("", line) if "SSH SIGNATURE" in line else line
    if _KEY.search(text):
        return KEY
    if _TOKEN.search(text):
        return TOKEN
    if "\0" in text or _HEX.search(text) or _encoded(text) or len(_BIG.findall(text)) >= _BIG_LIMIT:
        return SHARE
    return ""


def _encoded(text: str) -> bool:
    """Whether a long run of base64 characters mixes cases and digits, as rulers and paths do not."""
    return any(all(m.search(hit.group()) for m in _MIXED) for hit in _BASE64.finditer(text))


class Sieve:
    """Looks at lines in order; remembers numbers that stand one per line."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._number = 0
        self._lonely = 0

    def check(self, line: str) -> None:
        """Raises RedactionError if the line, or a column it continues, must not leave."""
        self._number += 1
        shape = shape_of(line)
        if not shape:
            # a tensor printed one value a line
            self._lonely = self._lonely + 1 if _BIG.fullmatch(line.strip().strip(",[]()")) else 0
            shape = SHARE if self._lonely >= _BIG_LIMIT else ""
        if shape:
            raise RedactionError(Finding(self._name, self._number, shape))


def checked(name: str, lines: Iterable[str]) -> Iterator[str]:
    """The lines, each looked at before it is handed on. Raises RedactionError."""
    sieve = Sieve(name)
    for line in lines:
        sieve.check(line)
        yield line
