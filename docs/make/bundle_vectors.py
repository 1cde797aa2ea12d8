"""A whole small run as a test vector: policy, bundle, transcripts of three workers, and what a verifier makes of it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

from docs.make.vectors import written

_ABOUT: Final = (
    "A rehearsed run of one step, all of it: files below a folder full (texts as they stand, leaves.bin in hex), the "
    "public keys to expect, and what follows from them (evidence, sections 4 to 10). It has no manifest: exit code 6."
)


def bundle() -> str:
    """The vector."""
    from uvcc_engine.bench.work.rehearsal import rehearse
    from uvcc_engine.transcript.proof.verifier import verify
    from uvcc_engine.transcript.terms.policy import Policy

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        rehearse(folder, steps=1, ops=1, nonce="33" * 32)
        policy = Policy.load(folder / "policy.json")
        keys = {f"P{party}": policy.public(party, 0).ed25519 for party in range(3)}
        certificate = verify(folder / "proof_bundle.json", allowed_signers=keys)
        files = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file() and "identity" not in path.parts and path.name != "open.bin"
        }
        return written(
            _ABOUT,
            keys=keys,
            policy_hash=policy.hash.hex(),
            sid_job=policy.sid_job.hex(),
            epochs=certificate.epochs,
            run_root=certificate.run_root,
            exit_code=6,
            texts={name: data.decode() for name, data in files.items() if not name.endswith(".bin")},
            leaves={name: data.hex() for name, data in files.items() if name.endswith(".bin")},
        )
