"""``uvcc verify PATH``: check a proof bundle; inside a run's folder, identities are pinned from its journal."""

from __future__ import annotations

from pathlib import Path

from uvcc_console.cli import common


def run(argv: list[str]) -> int:
    from uvcc_console.report.verify import run_verify

    return run_verify([_path(a) if i == 0 else a for i, a in enumerate(argv)])


def _path(word: str) -> str:
    """A run's name or folder in place of a path means the bundle of its full run."""
    path = Path(word)
    if word.startswith("-") or (path / "proof_bundle.json").exists() or path.is_file():
        return word
    for artifacts in (path, path / "artifacts"):
        if (artifacts / "full").is_dir() or (artifacts / "smoke").is_dir():
            return _bundle_of(artifacts)
    if path.exists() or not common.run_dirs():
        return word
    known = {d.name for d in common.run_dirs()}
    if word in ("last", "current") or any(name.startswith(word) for name in known):
        return _bundle_of(common.find_run(word) / "artifacts")
    return word


def _bundle_of(artifacts: Path) -> str:
    return str(artifacts / ("full" if (artifacts / "full" / "proof_bundle.json").exists() else "smoke"))
