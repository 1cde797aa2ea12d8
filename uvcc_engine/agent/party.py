"""The party identity that is born on this pod, and the policy that it signs."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

from uvcc_engine.contract.errors import ConfigError, UvccError
from uvcc_engine.contract.machine import installed_code
from uvcc_engine.contract.run_files import files
from uvcc_engine.transcript.signing.identity import PUBLIC

SEED_VARIABLE = "UVCC_IDENTITY_SEED"


def code_hash() -> str:
    """Hash of the wheel this process runs from; "" where it runs from a source tree."""
    return installed_code.code_hash()


def ensure_identity(folder: Path, seed_hex: str = "") -> dict[str, Any]:
    """The public identity in ``folder``; it is created if there is none. A half-made one is set aside."""
    public = folder / PUBLIC
    if not public.exists():
        from uvcc_engine.transcript.signing.identity import Identity

        made = folder.with_name(f"{folder.name}.tmp-{uuid.uuid4().hex[:8]}")
        try:
            seed = bytes.fromhex(seed_hex)
        except ValueError as error:
            raise ConfigError(f"{SEED_VARIABLE} is not hex", "give pairs of hex digits, or unset it") from error
        if seed:
            Identity.create_seeded(made, seed)
        else:
            Identity.create(made)
        if folder.exists():
            os.rename(folder, folder.with_name(f"{folder.name}.unfinished-{uuid.uuid4().hex[:8]}"))
        os.rename(made, folder)
        files.fsync_dir(folder.parent)
    return files.read_json(public)


def domain_key(root: Path) -> str:
    """The key of this pod's own domain. Raises ConfigError where nobody told it."""
    try:
        return (root / files.DOMAIN_KEY).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("this pod knows no domain that it obeys", "bootstrap it with its domain's key") from error


def sign_policy(root: Path, text: str, approval: str) -> dict[str, Any]:
    """Check that the policy names this pod's identity and this code and that its own domain approved it, and sign.

    Returns ``{party, policy_hash, signature}``. Raises ConfigError naming what the policy or the approval gets wrong.
    """
    try:
        from uvcc_engine.transcript.signed import approvals
        from uvcc_engine.transcript.signing.identity import Identity
        from uvcc_engine.transcript.terms import policy as policies
    except ImportError as error:
        raise UvccError(f"this installation cannot sign policies: {error}", "install the engine completely") from error
    if not code_hash():
        raise ConfigError("this pod runs from a source tree, which has no code hash", "bootstrap it with a wheel")
    policy = policies.Policy.from_bytes(text.encode())
    identity = Identity.load(root / "identity")
    party = policy.party_of(identity.public)
    approvals.check(approval, domain_key(root), of=approvals.POLICY, sha256=policy.hash.hex(), party=party)
    signature = policies.sign_policy(identity, policy, code_hash())
    return {"party": party, "policy_hash": policy.hash.hex(), "signature": signature}
