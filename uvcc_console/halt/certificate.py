"""Signed halt certificates: what a verified halt left on every pod, and what a resume must find there again.

``artifacts/halt-<nonce>.json`` is canonical JSON; ``.sig`` beside it is the operator's OpenSSH signature (Ed25519, the
run's own key, namespace ``uvcc-halt``) and ``halt_signers`` the line that ``ssh-keygen -Y verify`` wants::

    ssh-keygen -Y verify -f halt_signers -I operator -n uvcc-halt -s halt-N.json.sig < halt-N.json

A certificate is cited by the SHA-256 of its JSON. It is in force from its ``HaltDone`` until workers start again.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from uvcc_console.core import events as ev
from uvcc_console.core import paths
from uvcc_console.core.journal.journal import Journal
from uvcc_console.fleet.ssh_keys import operator_key, public_line
from uvcc_console.halt.machine import PodEvidence
from uvcc_engine.contract.errors import UnreadableError, VerificationError
from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.contract.parsing.untrusted import json_of
from uvcc_engine.contract.run_files import files
from uvcc_engine.transcript.signing import sshsig

NAMESPACE: Final = "uvcc-halt"
SIGNERS: Final = "halt_signers"
CHECK: Final = "halt certificate"
_HINT: Final = "uvcc teardown ends the run; only a checkpoint that is put back as it was can be resumed"
_SHA: Final = re.compile(r"([0-9a-f]{64}) [ *]step-(\d+)/MANIFEST\.json")


@dataclass(frozen=True, slots=True)
class HaltCertificate:
    """A certificate that was read and whose signature holds. ``sha256`` is how it is cited."""

    sha256: str
    nonce: str
    engine_run: str
    step: int
    pods: dict[str, PodEvidence]


def issue(
    run_dir: Path, done: ev.HaltDone, engine_run: str, pods: Mapping[str, PodEvidence], *, at: float
) -> HaltCertificate:
    """Sign and write the certificate of a verified halt. Raises UvccError where it cannot be written."""
    key = operator_key(run_dir)
    body = {
        "format": 1,
        "nonce": done.nonce,
        "run": run_dir.name,
        "engine_run": engine_run,
        "time": round(at, 3),
        "step": done.step,
        "pods": {name: asdict(pod) for name, pod in sorted(pods.items())},
        "signer": " ".join(public_line(key).split()[:2]),
    }
    payload = canonical(body)
    private = key.pyca_key
    if not isinstance(private, Ed25519PrivateKey):
        raise UnreadableError(f"the key of {run_dir.name} is not an Ed25519 key", "delete it and start a new run")
    signature = sshsig.sign(private, private.public_key().public_bytes_raw(), NAMESPACE, payload)
    folder = run_dir / "artifacts"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = _path(run_dir, done.nonce)
    files.write_atomic(folder / SIGNERS, f'operator namespaces="{NAMESPACE}" {body["signer"]}\n'.encode())
    files.write_atomic(path.with_name(path.name + ".sig"), signature.encode())
    files.write_atomic(path, payload)
    return _certificate(payload)


def read(run_dir: Path, nonce: str, sha256: str = "") -> HaltCertificate:
    """A halt's certificate. Raises VerificationError if it is absent, not as cited, or not signed by the run's key."""
    path = _path(run_dir, nonce)
    try:
        payload, signature = path.read_bytes(), path.with_name(path.name + ".sig").read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise VerificationError(CHECK, f"cannot read {path.name}: {e}", _HINT) from e
    if sha256 and hashlib.sha256(payload).hexdigest() != sha256:
        raise VerificationError(CHECK, f"{path.name} is not the one that the journal cites", _HINT)
    signer = " ".join(public_line(operator_key(run_dir)).split()[:2])
    if not sshsig.holds(signer, NAMESPACE, payload, signature):
        raise VerificationError(CHECK, f"{path.name} does not bear this run's signature", _HINT)
    try:
        found, run = _certificate(payload), str(json_of(payload)["run"])
    except (ValueError, KeyError, TypeError) as e:
        raise VerificationError(CHECK, f"{path.name} is no certificate: {e}", _HINT) from e
    if (run, found.nonce) != (run_dir.name, nonce):
        raise VerificationError(CHECK, f"{path.name} is of another halt ({run}, {found.nonce})", _HINT)
    return found


def in_force(run_dir: Path) -> HaltCertificate | None:
    """The newest halt's certificate, unless workers were started since; None if no verified halt is the last word.

    Raises VerificationError if the journal cites one that does not hold.
    """
    cited: ev.HaltDone | None = None
    journal = Journal(run_dir / paths.JOURNAL, readonly=True)
    try:
        for _, event in journal.since(0, kinds=(ev.HaltDone.kind, ev.PhaseStarted.kind)):
            if isinstance(event, ev.PhaseStarted):
                cited = None
            elif isinstance(event, ev.HaltDone) and event.certificate:
                cited = event
    finally:
        journal.close()
    return read(run_dir, cited.nonce, cited.certificate) if cited is not None else None


def listing(engine_run: str) -> str:
    """The shell command that lists a pod's checkpoints of an engine run for :func:`mismatch`."""
    return f"cd .uvcc/runs/{engine_run}/checkpoints 2>/dev/null && sha256sum step-*/MANIFEST.json 2>/dev/null || :"


def mismatch(pod: str, certified: PodEvidence, listed: str) -> str:
    """How a pod's checkpoints (``listed``) differ from what was certified; empty if they are the same. Pure."""
    found = {int(m[2]): m[1] for line in listed.splitlines() if (m := _SHA.fullmatch(line.strip()))}
    for coord, wanted in sorted(certified.checkpoints.items()):
        step = certified.steps.get(coord, -1)
        if step not in found:
            there = f"its last is of step {max(found)}" if found else "there is none"
            return f"{pod} has no checkpoint of step {step}, which {coord} left at the halt; {there}"
        if found[step] != wanted:
            return f"{pod}'s checkpoint of step {step} is {found[step][:12]}, certified was {wanted[:12]}"
        if max(found) > step:
            return f"{pod} has a checkpoint of step {max(found)}, but {coord} was halted at step {step}"
    return ""


def _path(run_dir: Path, nonce: str) -> Path:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,80}", nonce):
        raise VerificationError(CHECK, f"{nonce[:80]!r} cannot name a certificate")
    return run_dir / "artifacts" / f"halt-{nonce}.json"


def _certificate(payload: bytes) -> HaltCertificate:
    body: dict[str, Any] = json.loads(payload)
    pods = {name: PodEvidence(**pod) for name, pod in body["pods"].items()}
    sha = hashlib.sha256(payload).hexdigest()
    return HaltCertificate(sha, str(body["nonce"]), str(body["engine_run"]), int(body["step"]), pods)
