"""One signed list of every file that is handed over: ``MANIFEST.json`` and ``MANIFEST.json.sig`` in its folder.

The parties sign what they computed; whoever collects a run signs what lies beside it: logs, tables, figures, copies.
The list is canonical JSON, signed by the collector's Ed25519 key under the namespace ``uvcc-manifest``, so
``ssh-keygen -Y verify -f allowed_signers -I collector -n uvcc-manifest -s MANIFEST.json.sig < MANIFEST.json``
checks it.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError, UnreadableError, VerificationError
from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.transcript.formats import reading
from uvcc_engine.transcript.formats.reading import parse_canonical
from uvcc_engine.transcript.signed.statements import count, digest, exact
from uvcc_engine.transcript.signing import sshsig
from uvcc_engine.transcript.signing.signers import AllowedSigners

NAME: Final = "MANIFEST.json"
SIGNATURE: Final = "MANIFEST.json.sig"
FORMAT: Final = "uvcc-manifest-v1"
MOST_FILES: Final = 100_000
UNKNOWN: Final = 1024 * reading.MIB  # what is hashed on the word of a key that nobody vouches for
_LARGEST: Final = 32 * reading.MIB
_NAMED: Final = 5  # files that a refusal names
_OWN: Final = frozenset({NAME, SIGNATURE})
_PHASE: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """One file."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything handed over of one run. ``phases``: name -> (sid_job, policy hash); ``files`` by relative name."""

    run: str
    collector: str
    phases: Mapping[str, tuple[str, str]]
    files: Mapping[str, ManifestEntry]

    @property
    def text(self) -> bytes:
        """The bytes that are signed. Raises ConfigError for a file name that is no text."""
        listed = [{"bytes": e.size, "path": name, "sha256": e.sha256} for name, e in sorted(self.files.items())]
        phases = {name: {"policy_hash": hashed, "sid_job": sid} for name, (sid, hashed) in self.phases.items()}
        head = {"collector": self.collector, "format": FORMAT, "run": self.run}
        try:
            return canonical({**head, "files": listed, "phases": phases})
        except ValueError as e:
            raise ConfigError(f"a file's name is no UTF-8 text: {reading.reason(e)}", "rename it") from e

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Read strictly. Raises UnreadableError."""
        fields = ("collector", "files", "format", "phases", "run")
        found = exact(parse_canonical(data, NAME), fields, "manifest")
        if found["format"] != FORMAT:
            raise UnreadableError(f"{NAME} is not of format {FORMAT}", "read it with the version that wrote it")
        if not isinstance(found["run"], str) or not isinstance(found["collector"], str):
            raise UnreadableError(f"{NAME}: run and collector must be texts")
        if not isinstance(found["phases"], dict) or not isinstance(found["files"], list):
            raise UnreadableError(f"{NAME}: phases must be an object and files a list")
        phases = {_phase(name): _ids(ids) for name, ids in found["phases"].items()}
        files: dict[str, ManifestEntry] = {}
        for row in found["files"]:
            name, entry = _entry(row)
            if name in files:
                raise UnreadableError(f"{NAME} lists {reading.shown(name)} twice")
            files[name] = entry
        if list(files) != sorted(files):
            raise UnreadableError(f"{NAME} does not list its files in order")
        return cls(found["run"], found["collector"], phases, files)


def _phase(name: str) -> str:
    if not _PHASE.fullmatch(name):
        raise UnreadableError(f"{NAME}: {reading.shown(name, 80)!r} names no phase")
    return name


def _ids(data: Any) -> tuple[str, str]:
    found = exact(data, ("policy_hash", "sid_job"), "phase of the manifest")
    return digest(found["sid_job"], "sid_job").hex(), digest(found["policy_hash"], "policy_hash").hex()


def _entry(row: Any) -> tuple[str, ManifestEntry]:
    found = exact(row, ("bytes", "path", "sha256"), "file of the manifest")
    name = found["path"]
    if not isinstance(name, str) or not _is_inside(name):
        raise UnreadableError(f"{NAME}: {reading.shown(name, 80)!r} is no name of a file in the package")
    return name, ManifestEntry(count(found["bytes"], "bytes", 2**53), digest(found["sha256"], "sha256").hex())


def _is_inside(name: str) -> bool:
    parts = name.split("/")
    return name not in _OWN and "\0" not in name and all(part not in ("", ".", "..") for part in parts)


# ---- making --------------------------------------------------------------------------------------------------------


def survey(root: Path) -> dict[str, ManifestEntry]:
    """Every file below ``root`` with its size and hash. Raises UnreadableError for what is neither file nor folder."""
    lying = _lying(root)
    if odd := dict(sorted(lying.odd.items())):
        name, what = next(iter(odd.items()))
        raise UnreadableError(f"{reading.shown(root / name)} is {what}", "a package holds files and folders only")
    if lying.unread:
        raise UnreadableError(f"cannot list {reading.shown(root / lying.unread[0])}", "make it readable for yourself")
    return {name: _hashed(root, name) for name in lying.files if name not in _OWN}


def _lying(root: Path, most: int = MOST_FILES) -> reading.Tree:
    return reading.tree(root, 2 * most + 1000)


def _hashed(root: Path, name: str) -> ManifestEntry:
    with reading.open_regular(root / name, 2**60) as file:
        try:
            found = hashlib.file_digest(file, "sha256").hexdigest()
            return ManifestEntry(file.tell(), found)
        except OSError as e:
            raise UnreadableError(f"cannot read {reading.shown(root / name)}: {reading.reason(e)}") from e


def is_there(root: Path) -> bool:
    """Whether a package has a manifest, or one half of it."""
    return any(os.path.lexists(root / name) for name in (NAME, SIGNATURE))


# ---- checking ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Checked:
    """A manifest whose signature holds. ``unpinned``: why its key is not one that the caller expects; "" if it is."""

    manifest: Manifest
    unpinned: str


def read(root: Path, pins: AllowedSigners | None) -> Checked:
    """Read a manifest and check its signature; the files are not looked at, see :func:`differences`.

    Raises VerificationError if it is not signed, or by another key than the one pinned as ``collector``.
    """
    for name in (NAME, SIGNATURE):
        if not os.path.lexists(root / name):
            raise VerificationError("manifest", f"{name} is missing in {reading.shown(root)}")
    data, armored = reading.read_file(root / NAME, _LARGEST), reading.read_text(root / SIGNATURE, 4 * reading.KIB)
    key = sshsig.signer(armored)
    unpinned = _unpinned(key, pins)
    if not sshsig.holds(key, sshsig.MANIFEST_NAMESPACE, data, armored):
        raise VerificationError("manifest", f"{SIGNATURE} does not hold for {NAME}: one of them was changed")
    found = Manifest.from_bytes(data)
    if found.text != data or found.collector != key:
        raise VerificationError(
            "manifest", f"{NAME} names the collector {reading.shown(found.collector)}, {key} signed"
        )
    return Checked(found, unpinned)


def _unpinned(key: str, pins: AllowedSigners | None) -> str:
    if pins is None or not pins.of_principal(sshsig.COLLECTOR):
        return f"nothing says whose key {key} is; pin it: collector {key}"
    if why := pins.refusal(sshsig.COLLECTOR, key, (sshsig.MANIFEST_NAMESPACE,)):
        raise VerificationError("manifest", f"the manifest's key: {why}")
    return ""


def differences(root: Path, wanted: Mapping[str, ManifestEntry], free: Iterable[str] = ()) -> list[str]:
    """How the files below ``root`` differ from a list, one line each; ``free``: names that may differ.

    Reads at most the bytes that the list states, and stops listing soon after there are more files than it names.
    """
    lying, may = _lying(root, len(wanted)), set(free)
    found = [f"{reading.shown(name)} is {what}" for name, what in sorted(lying.odd.items())]
    found += [f"{reading.shown(name)} cannot be listed" for name in lying.unread]
    for name in sorted({*wanted, *lying.files} - may - _OWN):
        if name not in lying.files:
            if name not in lying.odd:
                found.append(f"{reading.shown(name)} is gone")
        elif name not in wanted:
            found.append(f"{reading.shown(name)} was added")
        elif lying.files[name] != wanted[name].size:
            found.append(f"{reading.shown(name)} was changed: {lying.files[name]} bytes, not {wanted[name].size}")
        elif _hashed(root, name) != wanted[name]:
            found.append(f"{reading.shown(name)} was changed: its SHA-256 is not {wanted[name].sha256}")
    return found


def check(root: Path, pins: AllowedSigners | None) -> Checked:
    """Read a manifest, check its signature, and hold every file below ``root`` against it.

    Raises VerificationError naming the files that were changed, added or removed.
    """
    found = read(root, pins)
    if found.unpinned and (stated := sum(e.size for e in found.manifest.files.values())) > UNKNOWN:
        raise UnreadableError(
            f"{NAME} by an unknown key lists {stated} bytes, at most {UNKNOWN} are read", found.unpinned
        )
    refuse(differences(root, found.manifest.files))
    return found


def refuse(wrong: list[str]) -> None:
    """Raise VerificationError naming the first of these differences, if there are any."""
    if wrong:
        more = f"; and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise VerificationError("manifest", "; ".join(wrong[:_NAMED]) + more)
