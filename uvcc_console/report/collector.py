"""The collector: this installation's own key, which signs the manifest of everything that a run hands over.

A manifest comes into being at the end of collect. Verbs that add files later (figures, hand-over, log bundle, screens)
renew it, but only after every other file was found as it was signed: what somebody changed meanwhile is named, never
signed again.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives import serialization as ser
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from uvcc_console.core import paths
from uvcc_console.core.log import logger
from uvcc_console.report.record import ARTIFACTS
from uvcc_engine.contract.errors import ConfigError, UnreadableError, UvccError, VerificationError
from uvcc_engine.contract.run_files.files import write_atomic
from uvcc_engine.transcript.formats import reading
from uvcc_engine.transcript.proof import manifest
from uvcc_engine.transcript.proof.bundle import NAME, POLICY_FILE
from uvcc_engine.transcript.signing import sshsig
from uvcc_engine.transcript.signing.signers import AllowedSigners
from uvcc_engine.transcript.terms.policy import LARGEST, Policy

log = logger(__name__)

KEY_FILE: Final = "collector_ed25519"


def key_file() -> Path:
    """Where the collector's private key lies."""
    return paths.config_dir() / KEY_FILE


def private_key() -> Ed25519PrivateKey:
    """The collector's key, made at first use (0600). Raises UnreadableError, UvccError if it cannot be written."""
    path = key_file()
    if not path.exists():
        _create(path)
    return _load(path)


def public_line() -> str:
    """The collector's public key; "" if there is none yet. Raises UnreadableError for a damaged key."""
    path = key_file()
    return _line(_load(path)) if path.exists() else ""


def _line(key: Ed25519PrivateKey) -> str:
    return sshsig.public_line(key.public_key().public_bytes_raw())


def _load(path: Path) -> Ed25519PrivateKey:
    data = reading.read_file(path, 64 * reading.KIB, named=True)
    if path.stat().st_mode & 0o077:
        raise UnreadableError(f"{path} is readable by others", f"chmod 600 {path}, or delete it to have a new one made")
    try:
        key = ser.load_ssh_private_key(data, None)
    except (ValueError, TypeError) as e:
        raise UnreadableError(f"cannot use the collector's key {path}: {e}", "delete it to have a new one made") from e
    if not isinstance(key, Ed25519PrivateKey):
        raise UnreadableError(f"{path} is no Ed25519 key", "delete it to have a new one made")
    return key


def _create(path: Path) -> None:
    paths.ensure(path.parent)
    pem = Ed25519PrivateKey.generate().private_bytes(ser.Encoding.PEM, ser.PrivateFormat.OpenSSH, ser.NoEncryption())
    temporary: Path | None = None
    try:
        fd, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
        temporary = Path(name)
        with os.fdopen(fd, "wb") as out:
            out.write(pem)
            out.flush()
            os.fsync(out.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)  # the first of two processes wins; the other uses its key
    except OSError as e:
        raise UvccError(f"cannot write the collector's key {path}: {e.strerror}", "is the disk full?") from e
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


# ---- manifests -----------------------------------------------------------------------------------------------------


def own_pins() -> AllowedSigners:
    """The collector of this installation, as the only one whose manifests are renewed here."""
    line = public_line()
    return AllowedSigners.of({sshsig.COLLECTOR: line} if line else {}, f"this installation ({key_file()})")


def seal(run_dir: Path) -> Path:
    """Write and sign the manifest of a run's artifacts as they are now; returns its path."""
    root = run_dir / ARTIFACTS
    return _sign(run_dir.name, root, manifest.survey(root))


def _sign(run: str, root: Path, files: dict[str, manifest.ManifestEntry]) -> Path:
    key = private_key()
    text = manifest.Manifest(run, _line(key), _phases(root, files), files).text
    armored = sshsig.sign(key, key.public_key().public_bytes_raw(), sshsig.MANIFEST_NAMESPACE, text)
    try:
        write_atomic(root / manifest.NAME, text)
        write_atomic(root / manifest.SIGNATURE, armored.encode())
    except OSError as e:
        raise UvccError(f"cannot write the manifest of {run}: {e.strerror}", "free disk space and repeat") from e
    log.info("the manifest of %d files is signed", len(files), run=run)
    return root / manifest.NAME


def _phases(root: Path, files: dict[str, manifest.ManifestEntry]) -> dict[str, tuple[str, str]]:
    """Every phase with a policy that can be read -> its sid_job and policy hash."""
    found = {}
    for name in sorted({n.partition("/")[0] for n in files if n.count("/") == 1 and n.endswith(f"/{NAME}")}):
        try:
            policy = Policy.from_bytes(reading.read_file(root / name / POLICY_FILE, LARGEST))
        except (UnreadableError, ConfigError) as e:
            log.warning("the manifest says nothing of phase %s: %s", name, e)
            continue
        found[name] = (policy.sid_job.hex(), policy.hash.hex())
    return found


def check(run_dir: Path) -> bool:
    """Whether a run has a manifest of this installation; if so, every file is as it was signed.

    Raises VerificationError naming what was changed, added or removed, or that another key signed.
    """
    root = run_dir / ARTIFACTS
    if not manifest.is_there(root):
        return False
    found = manifest.check(root, own_pins())
    if found.unpinned:
        raise VerificationError("manifest", f"{root / manifest.NAME} is not of this installation: {found.unpinned}")
    return True


def around(run_dir: Path, out: Path | None) -> AbstractContextManager[list[Path]]:
    """:func:`renewing` for what is written into the package; what goes elsewhere changes nothing of it."""
    return renewing(run_dir) if out is None else contextlib.nullcontext([])


@contextlib.contextmanager
def renewing(run_dir: Path) -> Iterator[list[Path]]:
    """Around whatever adds or replaces files of a run: they go into the list that this yields.

    A manifest that is there is checked before and signed anew after; without one, nothing is signed. Raises
    VerificationError naming a file that was changed since it was signed; nothing is written then.
    """
    root = run_dir / ARTIFACTS
    before = manifest.read(root, own_pins()).manifest.files if check(run_dir) else None
    written: list[Path] = []
    try:
        yield written
    finally:
        if before is not None:
            manifest.refuse(manifest.differences(root, before, _names(root, written)))
            seal(run_dir)


def _names(root: Path, written: Sequence[Path]) -> list[str]:
    home = Path(os.path.realpath(root))
    real = [Path(os.path.realpath(p)) for p in written]
    return [p.relative_to(home).as_posix() for p in real if p.is_relative_to(home)]


def reopen(run_dir: Path) -> None:
    """A run goes on after its manifest was signed: check every file, then withdraw the manifest until the next one.

    Raises VerificationError naming a file that was changed since it was signed.
    """
    if check(run_dir):
        for name in (manifest.SIGNATURE, manifest.NAME):
            (run_dir / ARTIFACTS / name).unlink(missing_ok=True)
