"""Mutated evidence, seeded: every mutation is refused by name, none raises anything else. ``UVCC_FUZZ_INPUTS`` counts.

The bundle's JSON is changed as text, as values, and as values whose policy is truly signed again by the three parties
(so that what comes after the signatures is reached); leaves, lines of signatures and signers are changed as bytes.
"""

from __future__ import annotations

import copy
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from mutation_kit import Json, at, paths

from uvcc_engine.bench.work.rehearsal import Rehearsal, rehearse
from uvcc_engine.contract.errors import UnreadableError, UvccError, VerificationError
from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.transcript.formats import reading
from uvcc_engine.transcript.leaves import leaf_file
from uvcc_engine.transcript.proof import derived_files, manifest
from uvcc_engine.transcript.proof.verifier import verify
from uvcc_engine.transcript.signing.signers import read_allowed_signers
from uvcc_engine.transcript.signing.sshsig import signer
from uvcc_engine.transcript.terms.policy import read_signatures

INPUTS = int(os.environ.get("UVCC_FUZZ_INPUTS", "2000"))
SEED = int(os.environ.get("UVCC_FUZZ_SEED", "0"))
ODD: list[Any] = [
    None, True, -1, 0, 1.5, 2**53 - 1, 10**15, "", "é", "\x1b[2J", "\u202e", "\U0001f600", "p0r0s0t0", "0" * 64, "ab",
    [], {}, [[]], {"": {}}, {"é": 1, "a": 2}, [None] * 50, "x" * 2000,
]  # fmt: skip
TOKENS = [
    b"[",
    b"]",
    b"{",
    b"}",
    b",",
    b":",
    b'"',
    b"\\u0000",
    b"\\ud800",
    b"1e999",
    b"NaN",
    b"-0",
    b"9" * 40,
    b"\x00",
    b"\xff",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Rehearsal:
    return rehearse(tmp_path_factory.mktemp("run"), steps=1, ops=1)


def bytes_changed(rng: random.Random, data: bytes) -> bytes:
    """One to three places changed."""
    found = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        where = rng.randrange(len(found) + 1)
        how = rng.randrange(6)
        if how == 0 and where < len(found):
            found[where] ^= 1 << rng.randrange(8)
        elif how == 1:
            del found[where : where + rng.choice([1, 4, 60, 500])]
        elif how == 2:
            found[where:where] = rng.choice(TOKENS) * rng.choice([1, 1, 3, 200])
        elif how == 3:
            found[where:where] = rng.randbytes(rng.randrange(1, 9))
        elif how == 4:
            piece = found[where : where + rng.randrange(1, 200)]
            to = rng.randrange(len(found) + 1)
            found[to:to] = piece
        else:
            found = found[:where]
    return bytes(found)


def value_changed(rng: random.Random, data: Json, places: list[tuple[Any, ...]]) -> Json:
    found = copy.deepcopy(data)
    way = rng.choice(places)
    outer = at(found, way[:-1])
    how = rng.randrange(4)
    if how == 0:
        del outer[way[-1]]
    elif how == 1 and isinstance(outer, dict):
        outer[rng.choice(["é", "", "x" * 500, "\U0001f600", "root"])] = rng.choice(ODD)
    elif how == 2 and isinstance(outer, list):
        outer.insert(rng.randrange(len(outer) + 1), copy.deepcopy(rng.choice([*outer, *ODD])))
    else:
        outer[way[-1]] = copy.deepcopy(rng.choice([*ODD, at(data, rng.choice(places))]))
    return found


def signed_again(run: Rehearsal, data: Json) -> Json:
    """The parties' true signatures over whatever the policy says now."""
    text = canonical(data["policy"])
    signatures = {str(p): i.sign("uvcc-policy", text) for p, i in enumerate(run.identities)}
    return {**data, "policy_signatures": signatures}


def refused(name: str, path: Path, data: bytes, before: bytes, **how: Any) -> None:
    if data == before:
        return
    path.write_bytes(data)
    try:
        verify(how.pop("bundle"), **how)
    except (VerificationError, UnreadableError) as e:
        said = str(e)
    else:
        raise AssertionError(f"accepted: {name}")
    finally:
        path.write_bytes(before)
    assert len(said) < 5000, name
    assert said.isprintable(), (name, said)


def test_bundles_of_any_bytes(run: Rehearsal) -> None:
    rng, text = random.Random(11 + 1000 * SEED), run.bundle.read_bytes()
    for i in range(INPUTS // 8):
        refused(f"bytes {i}", run.bundle, bytes_changed(rng, text), text, bundle=run.bundle)


def test_what_only_python_takes_for_equal_is_refused(run: Rehearsal) -> None:
    text = run.bundle.read_bytes()
    data = json.loads(text)
    data["epochs"][1]["epoch"] = True
    refused("true for one", run.bundle, canonical(data), text, bundle=run.bundle)
    data = json.loads(text)
    data["policy"]["parties"][0]["ed25519"] = data["policy"]["parties"][0]["ed25519"].replace("C3", "C\u02f93")
    refused("a key beyond ASCII", run.bundle, canonical(signed_again(run, data)), text, bundle=run.bundle)
    data = json.loads(text)
    for place in ("result", "roots"):  # what a refusal repeats of a file is cleaned
        odd = copy.deepcopy(data)
        said = odd["workers"][0][place] if place == "result" else odd["workers"][0][place][1]
        said["statement"]["version"] = "2\n\x1b[31m"
        refused("a version of two lines", run.bundle, canonical(odd), text, bundle=run.bundle)
    data = json.loads(text)
    data["epochs"][0]["9" * 9000] = data["epochs"][0].pop("epoch")
    refused("a long name", run.bundle, canonical(data), text, bundle=run.bundle)


@pytest.mark.ci(__file__)
def test_bundles_of_any_values(run: Rehearsal) -> None:
    rng, text = random.Random(12 + 1000 * SEED), run.bundle.read_bytes()
    data = json.loads(text)
    places = [way for way in paths(data) if way]
    of_policy = [way for way in places if way[0] == "policy"]
    pins = {f"P{p.party}": p.public.ed25519 for p in run.policy.parties}
    for i in range(INPUTS // 2):
        again = rng.random() < 0.5
        changed = value_changed(rng, data, of_policy if again and rng.random() < 0.7 else places)
        if again and isinstance(changed.get("policy"), dict):
            changed = signed_again(run, changed)
        refused(f"value {i}", run.bundle, canonical(changed), text, bundle=run.bundle, allowed_signers=pins)


@pytest.mark.ci(__file__)
@pytest.mark.parametrize("name", [leaf_file.LEAVES])
def test_transcripts_of_any_bytes(run: Rehearsal, name: str) -> None:
    rng = random.Random(13 + 1000 * SEED)
    path = run.folder / "pod1/transcript_p1r0s0t0" / name
    before = path.read_bytes()
    for i in range(INPUTS // 5):
        refused(f"{name} {i}", path, bytes_changed(rng, before), before, bundle=run.bundle)


def test_files_that_follow_from_the_bundle(run: Rehearsal, tmp_path: Path) -> None:
    """Readers of single files are total: they return or refuse, whatever the bytes."""
    rng = random.Random(14 + 1000 * SEED)
    folder = run.folder / "pod1/transcript_p1r0s0t0"
    key = run.policy.public(0).ed25519
    sources = {
        "policy_signatures.json": ((run.folder / "policy_signatures.json").read_bytes(), read_signatures),
        "roots.jsonl": ((folder / leaf_file.ROOTS).read_bytes(), lambda p: list(reading.lines(p, reading.MIB))),
        "result.json": ((folder / leaf_file.RESULT).read_bytes(), reading.read_json),
        "allowed": (f'P0,P1 namespaces="a,b",valid-before="20300101Z" {key} x\n'.encode(), read_allowed_signers),
        "training.csv": (b"step,loss\n0,nan\n1,0.25\n", lambda p: derived_files.check_training_rows({1: 0.25}, p)),
        "signature": (run.identities[0].sign("uvcc-manifest", b"x").encode(), lambda p: signer(reading.read_text(p))),
        "MANIFEST.json": (
            manifest.Manifest(
                "r", key, {"full": ("0" * 64, "1" * 64)}, {"a/b": manifest.ManifestEntry(1, "2" * 64)}
            ).text,
            lambda p: manifest.Manifest.from_bytes(reading.read_file(p)),
        ),
    }
    for name, (good, read) in sources.items():
        path = tmp_path / name
        path.write_bytes(good)
        read(path)
        for _ in range(INPUTS // 5):
            path.write_bytes(bytes_changed(rng, good))
            said = ""
            try:
                read(path)
            except UvccError as e:
                said = str(e)
            assert said.isprintable() and len(said) < 5000, (name, said)  # noqa: PT018
