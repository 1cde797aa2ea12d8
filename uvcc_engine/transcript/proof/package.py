"""What an auditor is handed, as a whole: the phases of a run with their bundles, the files beside them, the manifest.

:func:`examine` says what holds and, beside it, what of the contract's promises was not checked; only where nothing
lacks may anybody say "verified".
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError, UnreadableError, VerificationError
from uvcc_engine.contract.job.topology import PARTIES
from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.transcript.formats.reading import reason, shown
from uvcc_engine.transcript.proof import derived_files, manifest
from uvcc_engine.transcript.proof.bundle import NAME, Bundle
from uvcc_engine.transcript.proof.verification_certificate import HOLDS, VERIFIED, Certificate
from uvcc_engine.transcript.proof.verifier import examine as examine_bundle
from uvcc_engine.transcript.signing.signers import AllowedSigners
from uvcc_engine.transcript.signing.sshsig import NAMESPACES
from uvcc_engine.transcript.terms.policy import Policy

FULL: Final = "full"
OF_ONE_RUN: Final = "that they are phases of one run is the collector's word"
UNPINNED: Final = "IDENTITIES ARE NOT PINNED: whoever made this bundle chose the keys"
# what may lack -> exit code; of several, the smallest
CODES: Final[Mapping[str, int]] = {"pinned": 3, "transcripts": 4, "full": 5, "manifest": 6}
_ARTIFACTS: Final = "artifacts"
# files that only the folder of a whole run holds
RUN_EVENTS: Final = "run_full.jsonl"
RUN_LOG: Final = "run_full.log"
LAYOUT: Final = "dp_layout.json"
_OF_A_RUN: Final = (manifest.NAME, manifest.SIGNATURE, RUN_EVENTS, RUN_LOG, LAYOUT)
_MOST_PHASES: Final = 10_000
_OF_ONE: Final = "ask whoever collected it for one run"
PinsOf = Callable[[str], AllowedSigners | None]


@dataclass(frozen=True, slots=True)
class ExpectedSigners:
    """Whom the caller expects. ``said``: where that comes from; ``of``: the signers of a phase, by its name."""

    said: str = UNPINNED
    of: PinsOf = lambda phase: None


@dataclass(frozen=True, slots=True)
class PackageTarget:
    """What a path names. ``phases``: name -> bundle file; "" names a bundle that lies in no run's folder.

    ``root``: the folder of a whole run, if it is one or lies in one; ``whole``: the run itself was named, so that its
    full phase is promised; ``decides``: the phase that the verdict is about.
    """

    phases: Mapping[str, Path]
    root: Path | None
    decides: str
    whole: bool

    def deciding(self) -> Path:
        """The bundle that the verdict is about. Raises UnreadableError where no phase has one."""
        if not self.phases:
            raise UnreadableError(f"{shown(self.root)} holds no {NAME}", "was it a private run, and finished?")
        return self.phases[self.decides]


@dataclass(frozen=True, slots=True)
class PackageOutcome:
    """What was checked, all of which holds. ``lacks``: which promise was not checked -> why."""

    pins: str
    decides: str
    certificates: Mapping[str, Certificate]
    manifest: str
    lacks: Mapping[str, str]

    @property
    def exit_code(self) -> int:
        return min((CODES[name] for name in self.lacks), default=0)

    @property
    def word(self) -> str:
        return HOLDS if self.lacks else VERIFIED

    def to_json(self) -> dict[str, Any]:
        found = {name: c.to_json() for name, c in self.certificates.items()}
        return {
            **found[self.decides],
            "ok": not self.lacks,
            "verdict": self.word,
            "complete": not self.lacks,
            "missing": list(self.lacks),
            "why": dict(self.lacks),
            "pins": self.pins,
            "phase": self.decides,
            "manifest": self.manifest,
            "phases": {name: {k: c[k] for k in _OF_A_PHASE} for name, c in found.items()},
        }

    def text(self) -> str:
        """For people: the certificate of the phase that decides, the others in a line each, and what lacks."""
        about = f"phase {self.decides}: " if self.decides else ""
        lines = self.certificates[self.decides].text(self.word, about).splitlines()
        for name, c in self.certificates.items():
            if name != self.decides:
                lines.append(f"also holds   phase {name}: {c.epochs} epochs, global root {c.global_root}")
        lines += [f"manifest     {self.manifest}"] if self.manifest else []
        lines += [f"NOT CHECKED  {name}: {why}" for name, why in self.lacks.items()]
        return "\n".join(shown(line) for line in lines)


_OF_A_PHASE: Final = ("level", "epochs", "leaves", "sid_job", "policy_hash", "global_root", "run_root", "result_hashes")


# ---- finding -------------------------------------------------------------------------------------------------------


def find(path: Path, phase: str = "") -> PackageTarget:
    """What ``path`` names: a bundle, its folder, or a run with its phases. Raises UnreadableError."""
    real = Path(os.path.realpath(path))
    if not real.is_dir():
        return _lone(real, phase)
    if os.path.lexists(real / NAME):
        return _lone(real / NAME, phase)
    for root in (real / _ARTIFACTS, real):
        phases = dict(_phases(root)) if root.is_dir() and not root.is_symlink() else {}
        if phases or (root.is_dir() and manifest.is_there(root)):
            if phase and phase not in phases:
                raise UnreadableError(
                    f"{shown(root)} holds no {NAME} of the phase {shown(phase, 80)!r}", "see its name"
                )
            if phase:
                return PackageTarget({phase: phases[phase]}, root, phase, whole=False)
            return PackageTarget(phases, root, FULL if FULL in phases else max(phases, default=""), whole=True)
    raise UnreadableError(f"{shown(path)} holds no {NAME}", "name a run, its artifacts, or a bundle's folder")


def _lone(bundle: Path, phase: str) -> PackageTarget:
    """A bundle that was named itself: if its folder lies in a run's, that says its phase and has the manifest."""
    folder, above = bundle.parent, bundle.parent.parent
    inside = bundle.name == NAME and any(os.path.lexists(above / name) for name in _OF_A_RUN)
    name = folder.name if inside else ""
    if phase and phase != name:
        raise UnreadableError(f"{shown(bundle)} is not the bundle of the phase {shown(phase, 80)!r}", "name the run")
    return PackageTarget({name: bundle}, above if inside else None, name, whole=False)


def _phases(root: Path) -> Iterator[tuple[str, Path]]:
    """The folders below a run's artifacts that hold a bundle, in order of name."""
    try:
        with os.scandir(root) as listing:
            entries = list(itertools.islice(listing, _MOST_PHASES + 1))
    except OSError as e:
        raise UnreadableError(f"cannot list {shown(root)}: {reason(e)}", "name a folder that is yours") from e
    if len(entries) > _MOST_PHASES:
        raise UnreadableError(f"{shown(root)} holds more than {_MOST_PHASES} files", "name a run's folder")
    for entry in sorted(entries, key=lambda e: e.name):
        if entry.is_dir(follow_symlinks=False) and os.path.lexists(root / entry.name / NAME):
            yield entry.name, root / entry.name / NAME


# ---- examining -----------------------------------------------------------------------------------------------------


def examine(
    target: PackageTarget,
    pins: ExpectedSigners,
    *,
    policy: Path | None = None,
    transcripts: Path | None = None,
    against: Path | None = None,
    require: frozenset[str] = frozenset(),
    head: tuple[int, str] | None = None,
) -> PackageOutcome:
    """Check everything that lies there. ``policy``, ``transcripts``, ``against`` and ``head`` are about the phase that
    decides.

    Raises VerificationError naming the first thing that does not hold, or that lacks though it is in ``require``;
    UnreadableError; ConfigError for an unknown word in ``require``.
    """
    if unknown := sorted(require - CODES.keys()):
        raise ConfigError(f"cannot require {shown(unknown[0], 60)!r}", f"one of: {', '.join(CODES)}")
    target.deciding()
    expected = Policy.load(policy) if policy is not None else None
    certificates: dict[str, Certificate] = {}
    policies: dict[str, Policy] = {}
    for name, file in target.phases.items():
        main = name == target.decides
        signers = pins.of(name)
        if signers is None and expected is not None and not main:
            signers = AllowedSigners.of({f"P{p.party}": p.public.ed25519 for p in expected.parties}, f"{shown(policy)}")
        with _of_phase("" if main else name), _wrong_over_unreadable(target):
            certificates[name], bundle = examine_bundle(
                file,
                allowed_signers=signers,
                policy=policy if main else None,
                transcripts=transcripts if main else None,
                against=against if main else None,
                head=head if main else None,
            )
            _check_beside(file, bundle)
        policies[name] = bundle.policy
    if said := _of_one_run(policies, pins):
        decides = certificates[target.decides]
        certificates[target.decides] = replace(decides, warnings=(*decides.warnings, said))
    listed, lacks = _check_manifest(target, pins.of(target.decides), certificates, require)
    lacks = {**_lacking(target, certificates, require), **lacks}
    if wrong := [name for name in CODES if name in require & lacks.keys()]:
        raise VerificationError("required", "; ".join(f"{name}: {lacks[name]}" for name in wrong))
    ordered = {name: lacks[name] for name in CODES if name in lacks}
    return PackageOutcome(pins.said, target.decides, certificates, listed, ordered)


@contextlib.contextmanager
def _of_phase(name: str) -> Iterator[None]:
    """Adds the phase to what a check says, where it is not the one that the verdict is about."""
    try:
        yield
    except VerificationError as e:
        if not name:
            raise
        raise VerificationError(e.check, f"phase {name}: {e.finding}", e.hint) from e


@contextlib.contextmanager
def _wrong_over_unreadable(target: PackageTarget) -> Iterator[None]:
    """What cannot be read is wrong rather than unreadable where the collector's manifest says that it was changed."""
    try:
        yield
    except UnreadableError:
        if target.root is not None and manifest.is_there(target.root):
            manifest.check(target.root, None)
        raise


def _of_one_run(policies: Mapping[str, Policy], pins: ExpectedSigners) -> str:
    """Hold the phases of a package against each other; returns what only the collector says of them, "" if nothing.

    A policy names no run. What its phases do and reveal must be the same. Domains of their own sign proposal and
    attempt in every phase, so these must be, too. Where one operator ran all three, pods that were replaced have other
    keys, and so has another run: whoever expects both keys of a party at once cannot tell which it is. Raises
    VerificationError.
    """
    first = next(iter(policies))
    for name, policy in policies.items():
        if (policy.proposal, policy.attempt) != (policies[first].proposal, policies[first].attempt):
            what = f"phases {shown(first, 80)} and {shown(name, 80)} are of different proposals or attempts"
            raise VerificationError("phases", f"{what}: they are not of one run", _OF_ONE)
        _same_terms(first, policies[first], name, policy)
    keys = {p: {n: policy.parties[p].public.ed25519 for n, policy in policies.items()} for p in range(PARTIES)}
    other = [f"P{p}" for p, of in keys.items() if any(_lets(pins.of(n), f"P{p}", of, n) for n in of)]
    return f"{', '.join(other)} signed the phases with different keys: {OF_ONE_RUN}" if other else ""


def _same_terms(one: str, first: Policy, other: str, policy: Policy) -> None:
    """Phases of one run do one job, but for how many steps and from where, and reveal one list of values."""
    jobs = [{k: v for k, v in p.job.items() if k not in ("steps", "start")} for p in (first, policy)]
    ours, theirs = ({k: canonical(v) for k, v in job.items()} for job in jobs)
    odd = sorted(k for k in ours.keys() | theirs.keys() if ours.get(k) != theirs.get(k))
    which = f"phases {shown(one, 80)} and {shown(other, 80)}"
    if odd:
        raise VerificationError("phases", f"{which} are of different jobs: {shown(', '.join(odd), 200)}", _OF_ONE)
    if first.reveal != policy.reveal:
        raise VerificationError("phases", f"{which} reveal different values: they are not of one run", _OF_ONE)


def _lets(signers: AllowedSigners | None, who: str, keys: Mapping[str, str], phase: str) -> bool:
    """Whether the key of another phase would have done in this one."""
    others = set(keys.values()) - {keys[phase]}
    return any(signers is None or not signers.refusal(who, key, NAMESPACES) for key in others)


def _check_beside(file: Path, bundle: Bundle) -> None:
    """Files that follow from the bundle, where its folder is that of a phase."""
    if file.name == NAME:
        derived_files.check(file.parent, bundle)


def _lacking(target: PackageTarget, certificates: Mapping[str, Certificate], require: frozenset[str]) -> dict[str, str]:
    """What of the promises the certificates do not keep. A bundle alone does not say of which phase it is."""
    found: dict[str, str] = {}
    for name, c in certificates.items():
        where = f" of phase {name}" if name else ""
        if "pinned" in c.missing:
            found.setdefault("pinned", "name the keys that you expect with --allowed-signers or --policy")
        if c.unread:
            found.setdefault("transcripts", f"{shown(c.unread[0])}{where} cannot be listed: leaves may lie there")
        elif "transcripts" in c.missing:
            found.setdefault("transcripts", f"no transcripts{where} at hand: no leaf was recomputed")
    if FULL not in certificates and (target.whole or "full" in require):
        found["full"] = (
            f"no bundle of the full run is here, only of {', '.join(filter(None, certificates)) or 'a phase'}"
        )
    return found


def _check_manifest(
    target: PackageTarget,
    signers: AllowedSigners | None,
    certificates: Mapping[str, Certificate],
    require: frozenset[str],
) -> tuple[str, dict[str, str]]:
    """What the manifest says of itself, and what lacks of it. Raises VerificationError for any file that differs."""
    if target.root is None:
        return "", {"manifest": "the bundle lies in no run's folder"} if "manifest" in require else {}
    if not manifest.is_there(target.root):
        why = f"{shown(target.root)} has no {manifest.NAME}: the files beside the bundle are not covered"
        return "", {"manifest": why}
    found = manifest.check(target.root, signers)
    for name, c in certificates.items():
        if found.manifest.phases.get(name) != (c.sid_job, c.policy_hash):
            raise VerificationError("manifest", f"{manifest.NAME} is not of this bundle of the phase {shown(name, 80)}")
    said = f"{len(found.manifest.files)} files, none changed, added or removed; run {found.manifest.run}"
    return f"{said}; collector {found.manifest.collector}", {"manifest": found.unpinned} if found.unpinned else {}
