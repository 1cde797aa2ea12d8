"""What one line of text shows of shares, keys and tokens. Pure; every rule is linear in the length of the line.

A rule that needs more than one line leaves its count in :class:`Marks`; :mod:`redact` adds them up over a window.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

KEY, TOKEN, SHARE = "key-shaped", "token-shaped", "share-shaped"

_KEY: Final = re.compile(
    r"-----BEGIN [A-Z ]{0,32}PRIVATE KEY|b3BlbnNzaC1rZXktdjE|PuTTY-User-Key-File|AGE-SECRET-KEY-1"
    r"|(?:private[_-]?key|privkey|secret[_-]?key|seed_hex)[\"']?\s{0,8}[:=]\s{0,8}[\"']?[0-9A-Za-z+/=_-]{16,}",
    re.IGNORECASE,
)
_TOKEN: Final = re.compile(
    r"\bBearer\s+[A-Za-z0-9._~+/=-]{12,}|\bAuthorization\s{0,8}:\s{0,8}\S+"
    r"|\beyJ[A-Za-z0-9_-]{10,400}\.[A-Za-z0-9_-]{10,2000}\.[A-Za-z0-9_-]{5,}"
    r"|\b(?:ghp|gho|ghs|glpat|hf|sk|pit|xox[abp])[_-][A-Za-z0-9_-]{16,}|\bAKIA[0-9A-Z]{16}\b"
    r"|(?:token|api[_-]?key|apikey|password|passwd|secret)[\"']?\s{0,8}[:=]\s{0,8}[\"']?[A-Za-z0-9._~+/=-]{12,}",
    re.IGNORECASE,
)
# a line without any of these, in small letters, is spared the two patterns above
_HINT: Final = re.compile(
    r"priv|secr|seed_|b3bl|putt|tok|api|pass|bear|auth|eyj|akia|gh[pos][_-]|glpa|hf[_-]|sk[_-]|pit[_-]|xox|age-"
)
_BYTES: Final = re.compile(r"(?:\\x[0-9a-f]{2}[^\\]{0,2}){32,}", re.IGNORECASE)

# public by design, whatever it looks like: signatures, certificates, public keys and their fingerprints
_PUBLIC: Final = re.compile(
    r"-----BEGIN (SSH SIGNATURE|CERTIFICATE|PUBLIC KEY)-----[^-]{0,8192}-----END \1-----"
    r"|\b(?:ssh-(?:rsa|dss|ed25519)|ecdsa-sha2-\S{1,20}|sk-\S{1,40}) +AAAA[A-Za-z0-9+/]{1,1200}={0,2}"
    r"|\bSHA256:[A-Za-z0-9+/]{43}\b"
)
PUBLIC_BEGINS: Final = re.compile(r"-----BEGIN (SSH SIGNATURE|CERTIFICATE|PUBLIC KEY)-----[^-]*$")
PUBLIC_ENDS: Final = re.compile(r"-----END (?:SSH SIGNATURE|CERTIFICATE|PUBLIC KEY)-----")

_LONG_HEX: Final = re.compile(r"(?<![0-9A-Za-z+/])(?:0x)?([0-9A-Fa-f]{64,})(?![0-9A-Za-z+/=])|[0-9A-Fa-f]{129,}")
_HEX_LINE: Final = re.compile(r"[\s\"'\[(]*(?:0x)?([0-9A-Fa-f]{24,})[\s\"',\])]*")
_WORD: Final = re.compile(r"(?<![0-9A-Za-z+/])(?:0x[0-9A-Fa-f]{14,16}|[0-9A-Fa-f]{16})(?![0-9A-Za-z+/=])")
_OFFSET: Final = re.compile(r"[0-9A-Fa-f]{4,16}:$")
_DUMP: Final = re.compile(
    r"(?<![0-9A-Fa-f:])(?:[0-9A-Fa-f]{2} {1,2}){15,}[0-9A-Fa-f]{2}\b|\b(?:[0-9A-Fa-f]{4} ){7}[0-9A-Fa-f]{4}\b"
)
_BASE64: Final = re.compile(r"[A-Za-z0-9+/_-]{40,}={0,2}")
_ESCAPED_END: Final = re.compile(r"\\[rn]")
_IDENTIFIER: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_LETTERS: Final = re.compile(r"[G-Zg-z_]")

# a 32-byte value in hex is what its name says; without a name it may be a key
_NAMED_PUBLIC: Final = re.compile(
    r"root|sha_?(?:1|2|3)?|hash|digest|commit|(?:^|_)sid|x25519|ed25519|certificate|fingerprint|checkpoint|manifest"
    r"|policy|bundle|pairs|leaf|^head$|^seen$|owner$|nonce$|identity|^p[0-9]+r[0-9]+(?:s[0-9]+t[0-9]+)?$",
    re.IGNORECASE,
)
_NAMED_SECRET: Final = re.compile(r"key|seed|secret|priv|share|mask|token|blind|passw", re.IGNORECASE)
_SUMS: Final = re.compile(r"\s*[0-9a-f]{64} [ *]\S")
# a run that went on under another policy names the one before it, as a key of its own and not in prose
_BEFORE: Final = re.compile(r"(?:\bstart\.of|[\"']of[\"'])\s{0,8}[:=]\s{0,8}[\"']?$|\bof=$")
_TABLE: Final = re.compile(r"\|[ 0-9]+\|\s*`?(?:0x)?$")

_LABELLED: Final = re.compile(r"(?<=[\w\"'])\s{0,4}[:=]\s{0,4}[-+]?[\d.][\w.+-]*")
_BIG: Final = re.compile(r"(?<![\w.+-])-?(?:\d{16,20}|\d\.\d+e\+1[5-9])(?![\w.])")
_FLOAT: Final = re.compile(r"(?<![\w.+-])[-+]?(?:\d+\.\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.]| ?\$)")  # and no price
_PARTS: Final = re.compile(
    r"(?P<open>\[)|(?P<close>\])|(?P<made>\b(?:tensor|array|Parameter containing:)\(?)"
    r"|(?P<number>(?<![\w.+-])[-+]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][-+]?\d+)?(?![\w.]| ?\$))"
)
_NAMES_IN_ARRAYS: Final = frozenset(
    (
        *("nan", "inf", "np", "array", "tensor", "dtype", "torch", "numpy", "device", "cuda", "cpu"),
        *("requires", "grad", "fn", "True", "False", "float", "int", "uint"),
    )
)
_WORDS: Final = re.compile(r"[A-Za-z]{2,}")
_LIST_OF_NUMBERS: Final = re.compile(r"\[[\s\[(]*(?:[-+.0-9]|nan|inf|np\.|tensor|array|$)|tensor\(|array\(")
_HEX_AT_ALL: Final = re.compile(r"[0-9A-Fa-f]{14}|[0-9A-Fa-f]{4} [0-9A-Fa-f]{4} |[0-9A-Fa-f]{2} {1,2}[0-9A-Fa-f]{2} ")
_NUMBER_AT_ALL: Final = re.compile(r"\d{16}|\d\.\d+e\+1")
_NO_UPPER: Final = dict.fromkeys(map(ord, "ABCDEFGHIJKLMNOPQRSTUVWXYZ"))
_NO_DIGIT: Final = dict.fromkeys(map(ord, "0123456789"))
_NO_LOWER: Final = dict.fromkeys(map(ord, "abcdefghijklmnopqrstuvwxyz"))
ROW: Final = 16  # so many bare fractions in a row of no list
IN_LIST: Final = 6  # what is left of a long array when it is shortened for printing
IN_TENSOR: Final = 3
HEX_RUN: Final = 129
BASE64_RUN: Final = 160


@dataclass(slots=True)
class Marks:
    """What a line shows. ``certain`` is a shape that needs no second line; the others are counted over lines."""

    certain: str = ""
    bigs: int = 0
    odd_bigs: int = 0  # of them, those that are no time in micro- or nanoseconds
    words: int = 0
    dump: int = 0
    base64: int = 0
    hex_line: int = 0

    @property
    def counts(self) -> bool:
        """Whether there is anything to be added up."""
        return bool(self.bigs or self.words or self.dump or self.base64)


def without_public(line: str) -> str:
    """The line without what may be shown to anybody."""
    return _PUBLIC.sub(" ", line) if "-----" in line or "AAAA" in line or "SHA256:" in line else line


def measure(line: str, above: str = "") -> Marks:
    """Look at one line; ``above`` is the earlier line with the name of the list that goes on here, if one does."""
    found = Marks()
    hinted = _HINT.search(line.lower())
    if hinted and _KEY.search(line):
        found.certain = KEY
    elif hinted and _TOKEN.search(line):
        found.certain = TOKEN
    elif "\0" in line or ("\\x" in line and _BYTES.search(line)):
        found.certain = SHARE
    if found.certain:
        return found
    if _HEX_AT_ALL.search(line):
        _hex(line, above, found)
    _base64(line, found)
    if _NUMBER_AT_ALL.search(line) or line.count(".") >= ROW:
        _numbers(line, found)
    return found


def _hex(line: str, above: str, found: Marks) -> None:
    for hit in _LONG_HEX.finditer(line):
        size = len(hit.group(1) or hit.group())
        if size >= HEX_RUN or (size != 64 and not _named_public(line, hit.start(), above)):
            found.certain = SHARE
            return
        if size == 64 and not _SUMS.match(line) and not _named_public(line, hit.start(), above):
            found.certain = KEY
            return
    whole = _HEX_LINE.fullmatch(line)
    if whole and not (len(whole[1]) in (64, 128) and _named_public(line, 0, above)):
        found.hex_line = len(whole[1])
    end, hits = -9, 0
    for hit in _WORD.finditer(line):
        text = hit.group().removeprefix("0x").removeprefix("0X")
        if text.startswith("0000") or text.isdigit():
            continue  # an address of this machine's memory, or a decimal number
        hits += 1
        ahead = line[max(0, hit.start() - 40) : hit.start()].rstrip(" \t\"'`-")
        follows = hit.start() - end <= 4
        end = hit.end()
        if follows or not ahead or ahead[-1] in "[(,|;{<" or _OFFSET.search(ahead) or ahead.rstrip(" :=").endswith("]"):
            found.words += 1
    found.words = max(found.words, hits if hits >= 4 else 0)
    found.dump = len(_DUMP.findall(line))


def _named_public(line: str, at: int, above: str) -> bool:
    """Whether the nearest name ahead that says anything says that this is public."""
    ahead = line[max(0, at - 600) : at]
    if _TABLE.search(ahead) or _BEFORE.search(ahead):
        return True
    told = _says(ahead)
    if told is None and above and not _LETTERS.search(_LONG_HEX.sub(" ", ahead)):
        told = _says(above)
    return bool(told)


def _says(text: str) -> bool | None:
    """What the last of the names that say anything says: public, or secret."""
    for name in reversed(_IDENTIFIER.findall(_LONG_HEX.sub(" ", text))[-8:]):
        if _NAMED_SECRET.search(name):
            return False
        if _NAMED_PUBLIC.search(name):
            return True
    return None


def names_something(line: str) -> bool:
    """Whether there are names on a line, beside what is hexadecimal."""
    return bool(_LETTERS.search(_LONG_HEX.sub(" ", line[-600:])))


def _base64(line: str, found: Marks) -> None:
    text = _ESCAPED_END.sub("", line) if "\\" in line else line
    for hit in _BASE64.finditer(text):
        run = hit.group()
        if mixed(run):
            found.base64 += len(run)
            if len(run) >= BASE64_RUN:
                found.certain = SHARE


def mixed(run: str) -> bool:
    """Whether a run mixes cases and digits as random bytes do, and names, paths and rulers do not."""
    size = len(run)
    upper = size - len(run.translate(_NO_UPPER))
    if not upper or upper == size:
        return False
    digits, lower = size - len(run.translate(_NO_DIGIT)), size - len(run.translate(_NO_LOWER))
    return bool(digits and lower) and 10 * (digits + upper) >= 3 * size and not _LONG_HEX.fullmatch(run)


def _numbers(line: str, found: Marks) -> None:
    bare = _LABELLED.sub(":", line)
    for hit in _BIG.finditer(bare):
        found.bigs += 1
        found.odd_bigs += not _a_time(hit.group())
    if len(_FLOAT.findall(bare)) >= ROW:
        found.certain = SHARE


def _a_time(text: str) -> bool:
    """Whether a number is a time of these decades in micro- or nanoseconds."""
    return text.isdigit() and len(text) in (16, 19) and "15" <= text[:2] <= "22"


class Arrays:
    """Counts the numbers between brackets, also where an array goes on over many lines."""

    def __init__(self) -> None:
        self._depth = self._fractions = self._all = 0
        self._tensor = False

    def add(self, line: str) -> bool:
        """Whether the array that this line belongs to has shown enough to be one."""
        if self._depth and not _goes_on(line):
            self._end()
        if not self._depth and not ("[" in line and _LIST_OF_NUMBERS.search(line)):
            return False
        bare = _LABELLED.sub(":", line)
        for part in _PARTS.finditer(bare):
            kind = part.lastgroup
            if kind == "open":
                self._depth += 1
            elif kind == "close":
                self._depth = max(0, self._depth - 1)
                if not self._depth:
                    self._end()
            elif kind == "made":
                self._tensor = True
            elif self._depth:
                self._all += 1
                self._fractions += "." in part.group() or "e" in part.group()
                enough = self._all >= IN_TENSOR if self._tensor else self._fractions >= IN_LIST
                if enough:
                    return True
        if not self._depth:
            self._end()
        return False

    def _end(self) -> None:
        self._depth = self._fractions = self._all = 0
        self._tensor = False


def _goes_on(line: str) -> bool:
    """Whether a line may be the inside of an array that an earlier line opened."""
    return all(name in _NAMES_IN_ARRAYS for name in _WORDS.findall(line))
