"""What the files of a run say now: a phase verified anew, pods' files against their checksums, COMMIT records.

Reports say nothing of a file that they have not read here. A file that is not what its pod sent is named and not
quoted, whatever the journal told of it when it came.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from uvcc_console.core.answers.shown import shown
from uvcc_console.report.recheck import digest
from uvcc_console.report.record import RunRecord
from uvcc_console.report.run_log import Translator, human, stamp
from uvcc_engine.contract.errors import UvccError
from uvcc_engine.contract.run_files import files
from uvcc_engine.transcript.formats.reading import OLD
from uvcc_engine.transcript.proof.bundle import NAME, POLICY_FILE
from uvcc_engine.transcript.proof.package import RUN_LOG
from uvcc_engine.transcript.proof.verification_certificate import Certificate
from uvcc_engine.transcript.proof.verifier import verify
from uvcc_engine.transcript.terms.commit_record import RECORDS, check_record
from uvcc_engine.transcript.terms.policy import Policy

SUMS: Final = "SHA256SUMS"
EVENTS: Final = files.EVENTS
TRANSCRIPTS: Final = "transcripts"  # the level of a certificate whose every leaf was recomputed


@dataclass(frozen=True, slots=True)
class PhaseProof:
    """A phase verified at ``at``: its certificate, or why there is none. ``pinned``: with the console's own pins.

    ``then``: when the run's own release verified it, of a bundle that this one cannot read and that is still as it was;
    what this release cannot read is not refuted by it.
    """

    phase: str
    at: float
    certificate: Certificate | None = None
    pinned: bool = False
    error: str = ""
    then: float = 0.0

    @property
    def refusal(self) -> str:
        """The word for a phase without a certificate."""
        return "VERIFIED BY ANOTHER RELEASE, NOT BY THIS ONE" if self.then else "NOT VERIFIED"

    @property
    def whole(self) -> bool:
        """Whether everything was checked: identities as the console saw them, and every leaf."""
        return self.certificate is not None and self.pinned and self.certificate.level == TRANSCRIPTS


@dataclass(frozen=True)
class Package:
    """The artifacts folder of a run, read now. Everything is read once and kept."""

    record: RunRecord
    clock: Callable[[], float] = time.time
    _proofs: dict[str, PhaseProof] = field(default_factory=dict)
    _sums: dict[Path, dict[str, str]] = field(default_factory=dict)

    def proof(self, phase: str) -> PhaseProof:
        """The phase's proof bundle, verified with the identities that the pods showed the console over SSH."""
        if phase not in self._proofs:
            self._proofs[phase] = self._prove(phase)
        return self._proofs[phase]

    def _prove(self, phase: str) -> PhaseProof:
        path, at, pins = self.record.artifacts / phase / NAME, self.clock(), self.record.pins(phase)
        if not path.is_file():
            return PhaseProof(phase, at, error=f"there is no {NAME}")
        try:
            return PhaseProof(phase, at, verify(path, allowed_signers=pins or None), bool(pins))
        except UvccError as e:
            if not e.hint.endswith(OLD):
                return PhaseProof(phase, at, pinned=bool(pins), error=e.what)
            found = shown(self.record.snapshot, phase, self.record.changed)
            then = found.at if found.verified else 0.0
            return PhaseProof(phase, at, pinned=bool(pins), error=f"{e.what} ({e.hint})", then=then)

    def policy(self, phase: str) -> Policy | None:
        """The policy of a phase that verifies, pinned identities and all; None otherwise."""
        bundle = self.record.bundles.get(phase)
        return bundle.policy if bundle is not None and self.proof(phase).whole else None

    def trouble(self, path: Path) -> str:
        """What is wrong with a file that the package holds; "" if it is what it is said to be."""
        name = path.relative_to(self.record.artifacts).as_posix()
        phase, _, rest = name.partition("/")
        if name == RUN_LOG:
            return (
                ""
                if self._log.startswith(text_of(path))
                else "is not what the journal tells; uvcc bundle writes it anew"
            )
        if rest == NAME:
            proof = self.proof(phase)
            cannot = f"was verified {stamp(proof.then)}, this release cannot: " if proof.then else "does not verify: "
            return "" if proof.certificate else f"{cannot}{proof.error}"
        if rest == POLICY_FILE:
            return self._policy_trouble(phase, path)
        pod, _, mine = rest.partition("/")
        wanted = self.sums(self.record.artifacts / phase / pod)
        if mine not in wanted:
            return f"has no checksum of pod {pod} beside it"
        return "" if digest(path) == wanted[mine] else f"was changed after it came from pod {pod}"

    def _policy_trouble(self, phase: str, path: Path) -> str:
        policy = self.policy(phase)
        if policy is None:
            return "cannot be held against a signed one: the proof bundle does not verify"
        try:
            return "" if Policy.load(path).hash == policy.hash else "is not the policy that the parties signed"
        except UvccError as e:
            return f"cannot be read: {e.what}"

    def sums(self, folder: Path) -> Mapping[str, str]:
        """What a pod's listing said when its files were fetched: SHA-256 (hex) by name."""
        if folder not in self._sums:
            lines = (line.partition("  ") for line in text_of(folder / SUMS).splitlines())
            self._sums[folder] = {name: sha for sha, gap, name in lines if gap}
        return self._sums[folder]

    def sound(self, path: Path) -> bool:
        """Whether a file may be quoted."""
        return path.is_file() and not self.trouble(path)

    def altered(self) -> dict[str, str]:
        """Every file that a pod sent and that is not there as it was sent, with what is wrong with it."""
        found = {}
        for listing in sorted(self.record.artifacts.glob(f"*/*/{SUMS}")):
            for name in self.sums(listing.parent):
                path = listing.parent / name
                shown = path.relative_to(self.record.artifacts).as_posix()
                if not path.is_file():
                    found[shown] = "is not there any more"
                elif wrong := self.trouble(path):
                    found[shown] = wrong
        return found

    def reported(self, phase: str, *names: str) -> dict[str, list[dict[str, Any]]]:
        """Fields of these events as the pods' own logs have them, by pod; logs that were changed are left out."""
        found: dict[str, list[dict[str, Any]]] = {}
        for path in sorted((self.record.artifacts / phase).glob(f"*/{EVENTS}")) if phase else ():
            if not self.sound(path):
                continue
            for line in text_of(path).splitlines():
                event = object_of(line)
                fields = event.get("fields")
                if event.get("event") in names and isinstance(fields, dict):
                    found.setdefault(path.parent.name, []).append(fields)
        return found

    def committed(self, phase: str) -> dict[tuple[str, int], set[str]]:
        """Manifests (SHA-256) by coordinate of a pod's lead worker and step, under three parties' signatures.

        Only under a policy that verifies here; a record that does not hold counts for nothing.
        """
        policy = self.policy(phase)
        found: dict[tuple[str, int], set[str]] = {}
        for path in sorted((self.record.artifacts / phase).glob(f"*/{RECORDS}")) if policy else ():
            for line in text_of(path).splitlines():
                record = object_of(line)
                try:
                    said = check_record(record, policy) if policy else {}
                except UvccError:
                    continue
                for one in said.values():
                    found.setdefault((str(one["coord"]), int(record["step"])), set()).add(str(one["manifest"]))
        return found

    @cached_property
    def _log(self) -> str:
        return human(Translator(self.record.run_dir).translate(self.record.events))


def text_of(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def object_of(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
