"""Where one domain's own pods come from: its provider, its account, its machines. Nobody else ever sees it.

A proposal names who hosts each party and nothing more. Each domain says the rest for itself when it joins
(``uvcc join PROPOSAL --fleet FILE``); ``fleet.yaml`` beside its key holds for proposals that it joins without.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from uvcc_console.federation.domain_key import DomainKey
from uvcc_console.plan import profile
from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.run_files.files import write_atomic
from uvcc_engine.transcript.formats import reading
from uvcc_engine.transcript.terms.proposal import Proposal

FILE: Final = "fleet.yaml"
FOLDER: Final = "fleets"
_LARGEST: Final = 64 * reading.KIB


def read(path: Path) -> dict[str, Any]:
    """A ``fleet`` section out of a file: the section itself, or a mapping that has it under ``fleet``.

    Relative names of files are of the file's own folder. Raises UnreadableError, ConfigError naming what is wrong.
    """
    found = profile.read(path)
    section = found["fleet"] if isinstance(found.get("fleet"), Mapping) else found
    if "parties" in section or ("per_party" in section and "provider" not in section):
        raise ConfigError(f"{path} names several parties' providers", "a domain has one: fleet: {provider: ...}")
    return dict(profile.anchored({"fleet": dict(section)}, path.resolve().parent)["fleet"])


def check(section: Mapping[str, Any], proposal: Proposal, party: int) -> None:
    """Hold a domain's fleet against the proposal, and see that its provider can be asked: nothing is rented.

    Raises ConfigError for a provider that the proposal does not name, an unknown key, and for missing credentials.
    """
    from uvcc_console.fleet.provider_kinds import known, provider_for

    named, own = proposal.providers[party], str(section.get("provider", ""))
    job = {"kind": "private", "model": "mlp-digits", "steps": 1}
    profile.parse({"job": job, "fleet": dict(section)}, "this domain's fleet")
    if named in known() and own != named:
        what = f"the proposal has P{party} at {named}, this fleet is {own}'s"
        raise ConfigError(what, "join with a fleet of that provider, or have it proposed anew with --providers")
    with tempfile.TemporaryDirectory(prefix="uvcc-join-") as scratch:
        provider_for(section, Path(scratch))


def keep(ours: DomainKey, proposal: Proposal, section: Mapping[str, Any]) -> None:
    """Note it for the rollout of this proposal (0600). Raises UvccError."""
    path = ours.folder / FOLDER / f"{proposal.id}.json"
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomic(path, json.dumps(section).encode(), mode=0o600)


def of(ours: DomainKey, proposal: Proposal) -> dict[str, Any]:
    """The fleet of this domain in the run of a proposal; empty where the profile's own holds.

    Raises UnreadableError for one that cannot be read.
    """
    joined = ours.folder / FOLDER / f"{proposal.id}.json"
    if joined.exists():
        found = reading.read_json(joined)
        if not isinstance(found, dict):
            raise ConfigError(f"{joined} is no fleet", "uvcc join PROPOSAL --fleet FILE writes it anew")
        return found
    usual = ours.folder / FILE
    return read(usual) if usual.exists() else {}


def words(section: Mapping[str, Any]) -> str:
    """``runpod/lab-b``: provider and account."""
    account = str(section.get("account") or "")
    return f"{section.get('provider')}{'/' if account else ''}{account}"
