"""``allowed_signers`` files: this reader and ``ssh-keygen -Y verify`` decide alike; what it refuses, it names."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from uvcc_engine.contract.errors import UnreadableError
from uvcc_engine.transcript.signing.identity import Identity
from uvcc_engine.transcript.signing.signers import AllowedSigners, matches, read_allowed_signers
from uvcc_engine.transcript.signing.sshsig import NAMESPACES

NAMESPACE = "uvcc-root"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> list[Identity]:
    folder = tmp_path_factory.mktemp("keys")
    return [Identity.create_seeded(folder / str(i), b"signer %d" % i) for i in range(2)]


@pytest.fixture
def allowed(tmp_path: Path) -> Path:
    return tmp_path / "allowed_signers"


def day(offset: int) -> str:
    return time.strftime("%Y%m%d", time.gmtime(time.time() + offset * 86_400))


def undated(lines: Iterable[str]) -> list[str]:
    """Names of tests without their days: of pytest's workers some may begin before midnight and some behind it."""
    return [re.sub(r"20\d{6}", "DAY", line) for line in lines]


# what stands before the key -> may P0 sign under NAMESPACE now?
LINES: dict[str, bool] = {
    "P0": True,
    "P1": False,
    "P0,P1": True,
    "P1,P0": True,
    "P*": True,
    "P?": True,
    "P??": False,
    "*": True,
    "p0": False,
    "!P0,*": False,
    "*,!P0": False,
    "!P1,P*": True,
    '"P0"': True,
    '"P0,P1"': True,
    'P0 namespaces="uvcc-root"': True,
    'P0 namespaces="uvcc-policy"': False,
    'P0 namespaces="uvcc-policy,uvcc-root"': True,
    'P0 namespaces="uvcc-*"': True,
    'P0 namespaces="*,!uvcc-root"': False,
    'P0 NameSpaces="uvcc-root"': True,
    f'P0 valid-before="{day(2)}"': True,
    f'P0 valid-before="{day(-2)}"': False,
    f'P0 valid-after="{day(-2)}"': True,
    f'P0 valid-after="{day(2)}"': False,
    f'P0 valid-after="{day(-2)}",valid-before="{day(2)}"': True,
    f'P0 valid-after="{day(-2)}0000",valid-before="{day(2)}235959"': True,
    f'P0 valid-after="{day(-4)}",valid-before="{day(-2)}"': False,
    f'P0 valid-before="{day(2)}Z"': True,
    f'P0 valid-before="{day(-2)}Z"': False,
    f'P0 namespaces="uvcc-root",valid-before="{day(2)}"': True,
    f'P0 valid-before="{day(2)}",namespaces="uvcc-policy"': False,
    "P0\t": True,
    "  P0  ": True,
}
MALFORMED = {
    'P0 namespaces="uvcc-root': "does not end",
    "P0 namespaces=uvcc-root": "quotation marks",
    'P0 namespaces="a",namespaces="uvcc-root"': "twice",
    'P0 valid-before="tomorrow"': "no time",
    'P0 valid-before="20261340"': "no time",
    f'P0 valid-after="{day(2)}",valid-before="{day(-2)}"': "not after",
    'P0 no-such-option="x"': "unknown option",
    'P0 namespaces="uvcc-root",': "follows",
    '"P0': "does not end",
}


def ours(path: Path, who: str, key: str, namespace: str = NAMESPACE) -> bool:
    return read_allowed_signers(path).refusal(who, key, (namespace,)) == ""


def openssh(path: Path, who: str, identity: Identity, namespace: str = NAMESPACE) -> bool:
    signature = path.with_name("signature")
    signature.write_text(identity.sign(namespace, b"payload"))
    words = ["ssh-keygen", "-Y", "verify", "-f", str(path), "-I", who, "-n", namespace, "-s", str(signature)]
    return subprocess.run(words, input=b"payload", capture_output=True, check=False).returncode == 0


needs_openssh = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")


@pytest.mark.parametrize(("line", "good"), LINES.items(), ids=undated(LINES))
def test_options_and_principals(line: str, good: bool, keys: list[Identity], allowed: Path) -> None:
    allowed.write_text(f"# people\n\n{line} {keys[0].public.ed25519} a comment\n")
    assert ours(allowed, "P0", keys[0].public.ed25519) is good
    assert not ours(allowed, "P0", keys[1].public.ed25519)


@needs_openssh
@pytest.mark.parametrize(("line", "good"), LINES.items(), ids=undated(LINES))
def test_openssh_decides_the_same(line: str, good: bool, keys: list[Identity], allowed: Path) -> None:
    allowed.write_text(f"# people\n\n{line} {keys[0].public.ed25519} a comment\n")
    assert openssh(allowed, "P0", keys[0]) is good


@pytest.mark.parametrize(("line", "why"), MALFORMED.items(), ids=undated(MALFORMED))
def test_a_malformed_line_is_named_and_openssh_takes_it_no_more_than_we(
    line: str, why: str, keys: list[Identity], allowed: Path
) -> None:
    allowed.write_text(f"P1 {keys[1].public.ed25519}\n{line} {keys[0].public.ed25519}\n")
    with pytest.raises(UnreadableError, match=rf"allowed_signers:2.*{why}"):
        read_allowed_signers(allowed)
    if shutil.which("ssh-keygen"):
        assert not openssh(allowed, "P0", keys[0])


@pytest.mark.ci(__file__)
@needs_openssh
def test_random_files_are_decided_alike(keys: list[Identity], allowed: Path) -> None:
    """Several lines and several keys for one principal, in random combination: 60 files, each asked four times."""
    rng = random.Random(7)
    for _ in range(60):
        lines = []
        for _ in range(rng.randrange(1, 5)):
            who = rng.choice(["P0", "P1", "P0,P1", "P*", "!P0,P*", "*", "somebody"])
            options = []
            if rng.random() < 0.5:
                options.append(f'namespaces="{rng.choice(["uvcc-root", "uvcc-policy", "uvcc-*", "!uvcc-root,*"])}"')
            if rng.random() < 0.3:
                options.append(f'valid-before="{day(rng.choice([-3, 3]))}"')
            if rng.random() < 0.3:
                options.append(f'valid-after="{day(rng.choice([-5, 5]))}"')
            if any(o.startswith("valid-b") and day(-3) in o for o in options):
                options = [o for o in options if not o.startswith("valid-after")]
            if f'valid-after="{day(5)}"' in options:
                options = [o for o in options if not o.startswith("valid-before")]
            lines.append(" ".join([who, *([",".join(options)] if options else []), rng.choice(keys).public.ed25519]))
        allowed.write_text("\n".join(lines) + "\n")
        for who, identity in (("P0", keys[0]), ("P0", keys[1]), ("P1", keys[0]), ("P1", keys[1])):
            assert ours(allowed, who, identity.public.ed25519) is openssh(allowed, who, identity), (lines, who)


def test_several_keys_of_one_principal(keys: list[Identity], allowed: Path) -> None:
    one, two = (k.public.ed25519 for k in keys)
    allowed.write_text(f'P0 namespaces="uvcc-policy" {one}\nP0 valid-before="{day(-2)}" {two}\nP0 {two}\n')
    found = read_allowed_signers(allowed)
    assert found.refusal("P0", two, NAMESPACES) == ""
    assert "line 1 does not permit the namespace uvcc-root" in found.refusal("P0", one, NAMESPACES)
    assert "do not name P2" in found.refusal("P2", one, NAMESPACES)


def test_keys_of_other_kinds_sign_nothing_here(keys: list[Identity], allowed: Path) -> None:
    rsa = "ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAAAQQC7"
    allowed.write_text(f"P0 {rsa}\nP0 {keys[0].public.ed25519}\n")
    assert ours(allowed, "P0", keys[0].public.ed25519)
    assert not ours(allowed, "P0", keys[1].public.ed25519)


@pytest.mark.parametrize("option", ["cert-authority", 'CERT-AUTHORITY,namespaces="uvcc-root"'])
def test_certificates_are_refused_by_name(option: str, keys: list[Identity], allowed: Path) -> None:
    allowed.write_text(f"P0 {option} {keys[0].public.ed25519}\n")
    with pytest.raises(UnreadableError, match="cert-authority"):
        read_allowed_signers(allowed)


def test_a_pattern_takes_no_time_however_it_is_made() -> None:
    began = time.process_time()
    assert not matches("uvcc-result" * 3, "*?" * 400 + "x")
    assert matches("uvcc-result", "*" * 2000)
    assert time.process_time() - began < 1.0


def test_pins_by_mapping(keys: list[Identity]) -> None:
    found = AllowedSigners.of({"P0": keys[0].public.ed25519}, "the journal of x")
    assert found.refusal("P0", keys[0].public.ed25519, NAMESPACES) == ""
    assert "in the journal of x" in found.refusal("P0", keys[1].public.ed25519, NAMESPACES)
