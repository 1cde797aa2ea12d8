"""What a verification found, as data and as text: no more than was checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from uvcc_engine.contract.job.proof_mode import COVERT, OFF, Proving
from uvcc_engine.transcript.formats.reading import shown
from uvcc_engine.transcript.terms.operation import NOTHING_PROVED

VERIFIED: Final = "VERIFIED"
HOLDS: Final = "HOLDS AS FAR AS CHECKED"


@dataclass(frozen=True, slots=True)
class Certificate:
    """What was verified. ``level``: "transcripts" if every leaf was recomputed, "bundle" if none was at hand.

    ``pinned``: the identities are those that the caller expects. ``unread``: folders that nobody could look into.
    ``proving``: what of the computation was proved; ``claims``: of how many claims all three signed that it was, or,
    where steps are audited, that ``audited`` of ``drawn`` steps of a domain were and held.
    """

    level: str
    sid_job: str
    policy_hash: str
    global_root: str
    run_root: str
    epochs: int
    leaves: int
    result_hashes: tuple[str, ...]
    values: Mapping[str, float]
    parties: tuple[Mapping[str, Any], ...]
    warnings: tuple[str, ...]
    operation: tuple[str, ...]
    proving: Proving = NOTHING_PROVED
    claims: int = 0
    audited: int = 0
    drawn: int = 0
    pinned: bool = False
    unread: tuple[str, ...] = ()

    @property
    def verify(self) -> str:
        """The mode of what was proved."""
        return self.proving.mode

    @property
    def missing(self) -> tuple[str, ...]:
        """What was not checked, though the contract promises it: of "pinned" and "transcripts"."""
        found = () if self.pinned else ("pinned",)
        return found if self.level == "transcripts" and not self.unread else (*found, "transcripts")

    @property
    def word(self) -> str:
        """The verdict's word: that something is verified is said only where nothing is missing."""
        return HOLDS if self.missing else VERIFIED

    def _computed(self) -> tuple[str, ...]:
        """What the signed verdicts say was proved, and what was not."""
        first, *others = self.proving.sentences
        if self.proving.mode == COVERT:
            first = (
                f"{self.audited} of {self.drawn} domains' steps were drawn for an audit, {self.claims} claims in all,"
                f" and all three signed that the proofs of those drawn held: {first}"
            )
        elif self.proving.mode != OFF:
            first = f"{self.claims} claims, of which all three signed that the proofs held: {first}"
        return (first, *others)

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": not self.missing,
            "level": self.level,
            "pinned": self.pinned,
            "missing": list(self.missing),
            "sid_job": self.sid_job,
            "policy_hash": self.policy_hash,
            "global_root": self.global_root,
            "run_root": self.run_root,
            "epochs": self.epochs,
            "leaves": self.leaves,
            "result_hashes": list(self.result_hashes),
            "values": dict(self.values),
            "parties": [dict(p) for p in self.parties],
            "warnings": list(self.warnings),
            "operation": list(self.operation),
            "verify": self.verify,
            "claims": self.claims,
            "audited": self.audited,
            "drawn": self.drawn,
        }

    def text(self, word: str = "", about: str = "") -> str:
        """The certificate for people; ``word`` in place of its own verdict's, ``about`` says of what it is."""
        leaves = f"{self.leaves} leaves, " + ("all recomputed" if self.level == "transcripts" else "signed counts only")
        verdict = word or self.word
        lines = [
            f"{verdict:<12} {about}{self.epochs} epochs, {leaves}",
            f"sid_job      {self.sid_job}",
            f"policy       {self.policy_hash}",
            f"global root  {self.global_root}  (epoch {self.epochs - 1})",
            f"run root     {self.run_root}",
            *(f"result hash  {h}" for h in self.result_hashes),
            *(f"revealed     {k} = {v}" for k, v in sorted(self.values.items())),
            *(f"P{p['party']}           {p['provider']}/{p['region']}  {p['ed25519']}" for p in self.parties),
            *(f"operated     {sentence}" for sentence in self.operation),
            *(f"computed     {sentence}" for sentence in self._computed()),
            *(f"warning      {w}" for w in self.warnings),
        ]
        return "\n".join(shown(line) for line in lines)
