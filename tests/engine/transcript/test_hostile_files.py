"""What an auditor may be handed instead of evidence: bounded time and memory, a verdict, never a traceback."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from verify_processes import Ended, Verifiers

from uvcc_engine.bench.work.rehearsal import Rehearsal, rehearse
from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.job.topology import Topology
from uvcc_engine.contract.parsing.canonical import canonical
from uvcc_engine.transcript.formats import reading
from uvcc_engine.transcript.leaves import leaf_file
from uvcc_engine.transcript.proof import head
from uvcc_engine.transcript.proof.bundle import find_folders
from uvcc_engine.transcript.signed.statements import coord_of
from uvcc_engine.transcript.signing import sshsig
from uvcc_engine.transcript.terms.operation import Operation
from uvcc_engine.transcript.terms.policy import Policy

# processor time that ends what grows without bound: a slow machine that other work presses took 5 s for a gigabyte
SECONDS, MIB = 40.0, 200.0
GIB = 1024**3
_lent: list[Verifiers] = []


@pytest.fixture(scope="module", autouse=True)
def _processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    _lent.append(Verifiers(tmp_path_factory.mktemp("said")))
    yield
    _lent.pop().close()


def run_verify(*args: object) -> Ended:
    """``verify`` as a process of its own."""
    return _lent[0].run(args)


def refused(*args: object) -> Ended:
    """Verify something hostile: refused, in bounds, in one line."""
    found = run_verify(*args)
    assert found.rc in (1, 2), (found.rc, found.err)
    assert "Traceback" not in found.err
    assert len(found.err) < 6000
    assert found.err.count("\n") == 1
    assert found.seconds < SECONDS, found
    assert found.mib < MIB, found
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Rehearsal:
    return rehearse(tmp_path_factory.mktemp("run"), steps=2, ops=2)


@pytest.fixture
def run(made: Rehearsal, tmp_path: Path) -> Path:
    shutil.copytree(made.folder, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def pins(made: Rehearsal, tmp_path: Path) -> Path:
    sshsig.write_allowed_signers(tmp_path / "pins", {f"P{p.party}": p.public.ed25519 for p in made.policy.parties})
    return tmp_path / "pins"


# ---- other things in a file's place --------------------------------------------------------------------------------


def fifo(path: Path) -> None:
    os.mkfifo(path)


def zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


def listening(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path must be short
    try:
        with socket.socket(socket.AF_UNIX) as s:
            s.bind(path.name)
    finally:
        os.chdir(here)


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def outward(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(GIB)


ODD: list[Callable[[Path], None]] = [fifo, zero, listening, Path.mkdir, loop, outward, sparse]


@pytest.mark.parametrize("put", ODD)
@pytest.mark.parametrize(
    "name",
    [
        "proof_bundle.json",
        "policy.json",
        "policy_signatures.json",
        "pod1/transcript_p1r0s0t0/leaves.bin",
        "pod1/transcript_p1r0s0t0",
    ],
)
def test_odd_files_in_the_folder(name: str, put: Callable[[Path], None], run: Path, pins: Path) -> None:
    path = run / name
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    put(path)
    if name.endswith("t0") and put is Path.mkdir:
        put = fifo  # an empty transcript is another test's
    refused(run, "--allowed-signers", pins)


@pytest.mark.parametrize("put", [fifo, listening, Path.mkdir, loop, zero, sparse])
@pytest.mark.parametrize("option", ["--allowed-signers", "--policy", "--against", "--transcripts", "path"])
def test_odd_files_named_by_the_caller(option: str, put: Callable[[Path], None], run: Path, tmp_path: Path) -> None:
    path = tmp_path / "odd"
    put(path)
    refused(*([path] if option == "path" else [run, option, path]))


def test_a_giant_file_of_signers_policies_or_text(run: Path, tmp_path: Path) -> None:
    big = tmp_path / "big"
    with big.open("wb") as file:
        for _ in range(64):
            file.write(b"P0 ssh-ed25519 AAAA\n" * 50_000)
    refused(run, "--allowed-signers", big)
    refused(run, "--policy", big)


# ---- bundles -------------------------------------------------------------------------------------------------------


def write(run: Path, value: object) -> Path:
    (run / "proof_bundle.json").write_bytes(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())
    return run


def genuine(run: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((run / "proof_bundle.json").read_bytes())
    return found


TEXTS: dict[str, bytes] = {
    "empty": b"",
    "nothing": b"null",
    "brackets": b"[" * 20_000_000,
    "objects": b'{"a":' * 5_000_000,
    "epochs of brackets": b'{"epochs":[' + b"[" * 20_000_000,
    "many small values": b'{"epochs":[' + b"[]," * 8_000_000 + b"[]]}",
    "an open string": b'{"epochs":["' + b'\\"' * 10_000_000,
    "a backslash at the end": b'{"epochs":["' + b'\\"' * 10_000_000 + b"\\",
    "a giant number": b'{"epochs":[' + b"9" * 10_000_000 + b"]}",
    "not a number": b'{"epochs":[NaN]}',
    "zeros": bytes(30_000_000),
    "not text": bytes(range(256)) * 1000,
    "a lone surrogate": b'{"epochs":["\\ud800"]}',
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts_that_are_no_bundle(name: str, run: Path) -> None:
    (run / "proof_bundle.json").write_bytes(TEXTS[name])
    refused(run)


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("name", ["brackets", "many small values", "an open string", "a giant number", "zeros"])
def test_texts_around_a_genuine_policy(name: str, where: str, run: Path) -> None:
    """The three signatures hold; what stands before or after them does not."""
    text = (run / "proof_bundle.json").read_bytes()
    at = text.index(b'],"format"')
    filler = TEXTS[name].removeprefix(b'{"epochs":[')
    changed = text[:at] + b"," + filler + text[at:] if where == "before" else text[:-1] + filler + text[-1:]
    (run / "proof_bundle.json").write_bytes(changed)
    refused(run)


def test_a_gigabyte_around_a_genuine_policy(run: Path, pins: Path) -> None:
    text = (run / "proof_bundle.json").read_bytes()
    at = text.index(b'],"format"')
    with (run / "proof_bundle.json").open("wb") as file:
        file.write(text[:at])
        file.seek(GIB)
        file.write(text[at:])
    refused(run)
    refused(run, "--allowed-signers", pins)


def policy_of(run: Path, made: Rehearsal, **topology: int) -> dict[str, object]:
    """The bundle under another topology, its policy truly signed by the three parties."""
    found = genuine(run)
    policy = found["policy"]
    assert isinstance(policy, dict)
    policy["topology"] = {**policy["topology"], **topology}
    signed = {str(p): i.sign("uvcc-policy", canonical(policy)) for p, i in enumerate(made.identities)}
    return {**found, "policy_signatures": signed}


@pytest.mark.parametrize("topology", [{"replicas": 10**9}, {"stages": 300}, {"tensor": 70_000}, {"replicas": 65_536}])
def test_a_giant_topology(topology: dict[str, int], run: Path, made: Rehearsal, pins: Path) -> None:
    write(run, policy_of(run, made, **topology))
    refused(run)
    refused(run, "--allowed-signers", pins)
    signed = genuine(run)
    signed["policy_signatures"] = dict.fromkeys("012", "")
    write(run, signed)
    refused(run)


VALUES: list[object] = [
    10**15, -1, 1.5, "", "é", "\u202e", "\x1b[2J", "x" * 5_000_000, [], [[]] * 1000, {}, {"é": 1}, {"": 0}, None, True
]  # fmt: skip


@pytest.mark.parametrize(
    "at", ["policy", "policy_signatures", "epochs", "workers", "result_hashes", "run_root", "é", "x" * 99]
)
def test_odd_values(at: str, run: Path) -> None:
    text = (run / "proof_bundle.json").read_bytes()
    for value in VALUES:
        write(run, {**genuine(run), at: value})
        from uvcc_engine.transcript.proof.cli import main

        assert main([str(run), "--json"]) in (1, 2), value
        (run / "proof_bundle.json").write_bytes(text)


def test_a_key_named_twice(run: Path) -> None:
    text = (run / "proof_bundle.json").read_bytes()
    (run / "proof_bundle.json").write_bytes(text.replace(b'"run_root":', b'"run_root":"x","run_root":'))
    refused(run)


def test_coordinates_of_any_length_are_refused_not_raised() -> None:
    for text in ("p0r0s0t" + "9" * 5000, "p0r0s0t٣", "p3r0s0t0", "p0r00s0t0", 7, None, ["p0r0s0t0"]):
        with pytest.raises(UnreadableError):
            coord_of(text)
    for sizes in ({"stages": 256}, {"replicas": 10**9}, {"tensor": 65_536}, {"microbatches": 0}):
        with pytest.raises(ConfigError):
            Topology(**sizes)


# ---- transcripts and folders ---------------------------------------------------------------------------------------


LEAVES: dict[str, bytes] = {
    "giant count": leaf_file.header(0, 2**63, bytes(32), bytes(32)),
    "giant numbers": leaf_file.header(2**32 - 1, 2**64 - 1, bytes(32), bytes(32)) + bytes(60),
    "many empty blocks": leaf_file.header(0, 0, bytes(32), bytes(32)) * 200_000,
    "zeros": bytes(96) * 10_000,
    "magic alone": b"UVCCEPO1",
    "empty": b"",
}


@pytest.mark.parametrize("name", LEAVES)
def test_odd_leaves(name: str, run: Path) -> None:
    (run / "pod1/transcript_p1r0s0t0/leaves.bin").write_bytes(LEAVES[name])
    refused(run)


def test_sparse_leaves_of_a_terabyte(run: Path) -> None:
    """The header is the true one, and the rest of the epoch lies in a hole."""
    path = run / "pod1/transcript_p1r0s0t0/leaves.bin"
    with path.open("r+b") as file:
        file.truncate(2**40)
    refused(run)


def test_links_in_a_circle_and_out_of_the_folder(run: Path, tmp_path: Path, pins: Path) -> None:
    (run / "round").symlink_to(run)
    (run / "pod0/deep").symlink_to("/")
    found = run_verify(run, "--allowed-signers", pins)
    assert found.rc == 0, found.err  # links are not followed, and nothing of the evidence is one
    shutil.move(run / "pod2", tmp_path / "elsewhere")
    (run / "pod2").symlink_to(tmp_path / "elsewhere")
    assert "p2r0s0t0" in refused(run).err


def test_a_folder_of_more_files_than_are_looked_at(run: Path) -> None:
    many = run / "many"
    many.mkdir()
    for i in range(22_500):
        (many / str(i)).touch()
    assert "more than" in refused(run).err
    found = reading.tree(run, 100_000)
    assert len(found.files) > 22_500


def test_deep_folders(run: Path, tmp_path: Path) -> None:
    here = os.getcwd()
    os.chdir(run)
    try:
        for _ in range(1500):
            os.mkdir("d" * 50)
            os.chdir("d" * 50)
    finally:
        os.chdir(here)
    found = run_verify(run)
    assert found.rc in (2, 3, 4), found.err
    assert "Traceback" not in found.err
    subprocess.run(["rm", "-rf", str(run)], check=True)


def test_names_that_are_no_text(run: Path) -> None:
    os.mkdir(os.fsencode(run) + b"/transcript_\xff\x1b[2J")
    found = refused(run)
    assert "\x1b" not in found.err


# ---- what is genuine is still read ---------------------------------------------------------------------------------


def test_a_large_genuine_bundle_is_read_in_little_more_than_its_size(tmp_path: Path) -> None:
    big = rehearse(tmp_path / "big", topology=Topology(4, 2, 2, 1), steps=2, ops=1)
    size = big.bundle.stat().st_size / 1024**2
    allowed = tmp_path / "pins"
    sshsig.write_allowed_signers(allowed, {f"P{p.party}": p.public.ed25519 for p in big.policy.parties})
    found = run_verify(big.folder, "--allowed-signers", allowed)
    assert found.rc == 0, found.err
    assert found.mib < 60 + 12 * size, (found, size)
    assert head.most_bytes(big.policy) > 8 * big.bundle.stat().st_size
    assert len(find_folders(big.folder)) == 48


def test_bounds_scale_with_the_policy_that_known_keys_signed(made: Rehearsal, run: Path) -> None:
    small, most = head.allowance(run / "proof_bundle.json", lambda p: False)[1], head.most_bytes(made.policy)
    assert small == min(most, head.UNKNOWN)
    size = Topology(64, 4, 4, 1)
    larger = {"topology": dataclasses.asdict(size), "operation": Operation.of(size).to_json()}
    wide = Policy.from_json({**made.policy.to_json(), **larger})
    assert head.most_bytes(wide) > 50 * most
    assert head.most_bytes(wide) <= reading.LARGEST


def test_json_is_read_strictly() -> None:
    for text in (
        b'{"a":1,"a":2}',
        b"NaN",
        b"1e999",
        b"9" * 17,
        b'"\\ud800"',
        b"[" * 65 + b"]" * 65,
        b"\xff",
        b"",
        b"1 2",
    ):
        with pytest.raises(UnreadableError):
            reading.parse_json(text, "it")
    assert reading.parse_json(b'{"a":["[[[[",1.5,null,"\\u00e9"]}', "it") == {"a": ["[[[[", 1.5, None, "é"]}
    assert reading.parse_json(b"[" * 64 + b"]" * 64, "it")
