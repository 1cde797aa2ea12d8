"""``HOWTO.md`` of a package: how a stranger checks it, step by step."""

from __future__ import annotations

from importlib.resources import files

from uvcc_console.report import collector
from uvcc_console.report.logbundle import hand_checks
from uvcc_console.report.package import Package
from uvcc_engine import __version__

_ALTERED = "a domain may have altered its own share while the run went on"
_UNPROVED = f"You do not know that each product was computed rightly: {_ALTERED}."
_PROVED = f"You do not know that what is not called proved above was computed rightly: {_ALTERED}."


def howto(package: Package) -> str:
    """The text, with the keys and the folder of the phase that decides."""
    phase = list(package.record.bundles)[-1]
    bundle = package.record.bundles[phase]
    keys = {f"KEY{p.party}": p.public.ed25519 for p in bundle.policy.parties}
    said = "\n".join(f"- {sentence}." for sentence in bundle.policy.operation.sentences(bundle.policy.proving))
    words = {
        "RUN": package.record.run_dir.name,
        "PHASE": phase,
        "HAND": "\n".join(hand_checks(bundle)),
        "COLLECTOR": collector.public_line() or "(made when the package is signed)",
        "VERSION": __version__,
        "COMPUTED": _PROVED if bundle.policy.proves else _UNPROVED,
        "OPERATED": f"How it was operated, as all three signed it:\n\n{said}",
        **keys,
    }
    text = (files("uvcc_console.report") / "howto.md").read_text()
    for name, value in words.items():
        text = text.replace(f"@{name}@", value)
    return text
