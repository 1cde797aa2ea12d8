"""One explained file: what is in it, and that nothing secret-shaped can get in."""

from __future__ import annotations

import base64
import hashlib
import random
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from report_run import RUN

from uvcc_console.report import redact
from uvcc_console.report.logbundle import OUTPUT, find_logs, write_bundle
from uvcc_console.report.redact import KEY, SHARE, TOKEN, RedactionError, checked, secret_kind
from uvcc_engine.transcript.signing.identity import Identity

_RNG = random.Random(7)
WORDS = [_RNG.randrange(-(2**63), 2**63) for _ in range(64)]
RAW = struct.pack("<64q", *WORDS)


def test_reads_from_the_top(run_dir: Path) -> None:
    path, *packed = write_bundle(run_dir)
    text = path.read_text()
    prose = re.sub(r"^````text\n.*?^````$", "", text, flags=re.MULTILINE | re.DOTALL)
    heads = [line for line in prose.splitlines() if line.startswith("# ")]
    assert heads == [
        f"# {RUN}: all logs, explained",
        "# 1. What ran",
        "# 2. Who",
        "# 3. The verifier's verdict",
        "# 4. Key figures",
        "# 5. Every file of the run",
        "# 6. Logs",
    ]
    assert "VERIFIED     4 epochs" in text
    assert "pin them" not in text
    assert "| epoch root | 12 |" in text
    assert "| worker timeouts | 0 |" in text
    assert "| full: unique result hashes | 1 |" in text
    assert "## full/p1r0/worker_p1r0s0t0.log" in text
    assert [p.suffix for p in packed] in ([".zst"], [])


@pytest.mark.skipif(not (shutil.which("ssh-keygen") and shutil.which("jq")), reason="needs ssh-keygen and jq")
def test_the_commands_for_third_parties_check_every_signature(run_dir: Path) -> None:
    """As written in the document, run by a shell in the folder that it names; a changed statement is refused."""
    text = write_bundle(run_dir)[0].read_text()
    commands = text.partition("## Without this product")[2].partition("````text\n")[2].partition("\n````")[0]
    assert commands.count("ssh-keygen -Y verify") == 3 + 2 * 3

    def shell() -> subprocess.CompletedProcess[str]:
        script = ["bash", "-euo", "pipefail", "-c", commands]
        return subprocess.run(script, cwd=run_dir / "artifacts/full", capture_output=True, text=True)

    done = shell()
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('Good "uvcc-policy" signature for P') == 3
    assert done.stdout.count('Good "uvcc-root" signature for P') == 3
    assert done.stdout.count('Good "uvcc-result" signature for P') == 3
    bundle = run_dir / "artifacts/full/proof_bundle.json"
    true = bundle.read_text()
    for old, new in (('"steps":3', '"steps":4'), ('"region":"eu"', '"region":"us"')):
        assert old in true
        bundle.write_text(true.replace(old, new))
        assert shell().returncode != 0, old


def test_every_file_is_listed_with_its_hash(run_dir: Path) -> None:
    text = write_bundle(run_dir)[0].read_text()
    files = [p for p in (run_dir / "artifacts").rglob("*") if p.is_file() and not p.name.startswith(OUTPUT)]
    assert len(files) > 20
    for path in files:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        assert f"| {path.relative_to(run_dir / 'artifacts').as_posix()} | {path.stat().st_size} | `{digest}`" in text


def test_packed_copy_is_the_same(run_dir: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    path, packed = write_bundle(run_dir)
    with packed.open("rb") as f:
        assert zstandard.ZstdDecompressor().stream_reader(f).read() == path.read_bytes()


def test_what_sinks_wrote_is_named_by_hexadecimal_ids_and_keeps_no_bundle_from_being_written(run_dir: Path) -> None:
    """A list of them looked like shares."""
    home = run_dir / "artifacts/full/p0r0"
    store = home / "mlruns/911860311187221700/1dc47fd4ba184989920d0465d687ebb1"
    for n in range(40):
        one = store / "params" / f"train.p{n}"
        one.parent.mkdir(parents=True, exist_ok=True)
        one.write_text("1")
    offline = home / "wandb/offline-run-1/logs"
    offline.mkdir(parents=True)
    (offline / "debug.log").write_text("settings: api_key=0123456789abcdef0123456789abcdef")
    (home / "sink_mlflow.log").write_text("waits for the server: refused")
    text = write_bundle(run_dir)[0].read_text()
    assert "train.p7" not in text
    assert "offline-run-1" not in text
    assert "in folders `wandb` and `mlruns`, is not listed" in text
    assert "waits for the server: refused" in text


def test_quoted_logs_cannot_close_their_quotation(run_dir: Path) -> None:
    (run_dir / "artifacts/full/p0r0/worker_p0r0s0t0.log").write_text("a\n````\n# VERIFIED by nobody\n")
    text = write_bundle(run_dir)[0].read_text()
    assert text.count("\n````\n") == text.count("\n````text\n")


def key_text(tmp_path: Path) -> str:
    Identity.create(tmp_path / "id")
    return (tmp_path / "id" / "ed25519").read_text().splitlines()[1]


PLANTED = {
    "list of shares": (SHARE, f"x0 = {WORDS[:8]}"),
    "tensor": (SHARE, f"tensor({WORDS[:6]}, dtype=torch.int64)"),
    "unsigned shares": (SHARE, " ".join(str(w % 2**64) for w in WORDS[:5])),
    "base64 tensor": (SHARE, f'{{"W_lo_b64": "{base64.b64encode(RAW).decode()}"}}'),
    "short base64 tensor": (SHARE, base64.b64encode(RAW[:128]).decode()),
    "hex tensor": (SHARE, RAW.hex()),
    "bytes": (SHARE, repr(bytes(range(128, 192)))),
    "binary": (SHARE, "abc\0def"),
    "private key head": (KEY, "-----BEGIN OPENSSH PRIVATE KEY-----"),
    "pkcs8": (KEY, "-----BEGIN PRIVATE KEY-----"),
    "named private key": (KEY, '{"private_key": "0123456789abcdef0123456789abcdef"}'),
    "age": (KEY, "AGE-SECRET-KEY-1QQPQYDL"),
    "bearer": (TOKEN, "POST /poll Authorization: Bearer abcDEF123456ghiJKL"),
    "bare bearer": (TOKEN, "using bearer 0f1e2d3c4b5a69788796"),
    "relay token": (TOKEN, "relay_token=Zm9vYmFyYmF6cXV4"),
    "json token": (TOKEN, '{"token": "a1b2c3d4e5f6a7b8"}'),
    "api key": (TOKEN, "UVCC_PRIME_API_KEY: pit_0123456789abcdef0123"),
    "jwt": (TOKEN, "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N"),
    "github": (TOKEN, "ghp_0123456789abcdefghijABCDEFGHIJ012345"),
    "password": (TOKEN, "password = correct-horse-battery"),
}


@pytest.mark.parametrize(
    "what", [pytest.param(value, marks=pytest.mark.ci(__file__) if n % 2 else ()) for n, value in enumerate(PLANTED)]
)
def test_planted_secrets_are_refused(run_dir: Path, what: str) -> None:
    shape, line = PLANTED[what]
    old = write_bundle(run_dir)
    log = run_dir / "artifacts/full/p2r0/worker_p2r0s0t0.log"
    log.write_text(f"fine\n{line}\nfine\n")
    with pytest.raises(RedactionError) as found:
        write_bundle(run_dir)
    assert found.value.finding == redact.Leak("full/p2r0/worker_p2r0s0t0.log", 2, shape)
    assert line not in str(found.value)
    assert not any(p.exists() for p in old), "a refused bundle must not leave an older one behind"
    assert not list((run_dir / "artifacts").glob("*.part"))


def test_a_real_private_key_is_refused(run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "artifacts/full/p0r0/worker_p0r0s0t0.log").write_text(key_text(tmp_path) + "\n")
    with pytest.raises(RedactionError, match="key-shaped"):
        write_bundle(run_dir)


def test_a_tensor_printed_one_value_a_line_is_refused() -> None:
    lines = ["tensor([", *[f"        {w}," for w in WORDS[:6]], "])"]
    with pytest.raises(RedactionError) as found:
        list(checked("x", lines))
    assert found.value.finding.line == 4


def test_secrets_in_events_are_refused_too(run_dir: Path) -> None:
    from uvcc_console.core import events as ev
    from uvcc_console.core.journal.journal import Journal

    journal = Journal(run_dir / "journal.sqlite")
    journal.append(ev.Alert(level="warn", name="relay", text="401 for token=Zm9vYmFyYmF6cXV4"))
    journal.close()
    with pytest.raises(RedactionError, match="token-shaped"):
        write_bundle(run_dir)


def test_a_file_can_be_left_out_knowingly(run_dir: Path) -> None:
    log = run_dir / "artifacts/full/p2r0/worker_p2r0s0t0.log"
    log.write_text("token=Zm9vYmFyYmF6cXV4\n")
    text = write_bundle(run_dir, exclude=["full/p2r0/worker_p2r0s0t0.log"])[0].read_text()
    assert "Zm9vYmFy" not in text
    assert re.search(r"\| full/p2r0/worker_p2r0s0t0\.log \| \d+ \| `[0-9a-f]{64}` \| no \|", text)


@pytest.mark.parametrize(
    "line",
    [
        "=" * 300,
        "-" * 500,
        "global_root " + "ab" * 32,
        "sha512 " + "cd" * 64,
        "/a/very/long/path" * 20,
        '{"ts": 1700000000123456789, "start_ns": 1700000000123456789, "loss": 0.1234567890123456789}',
        "tokens: 131072, toks_per_s: 5123.25, token_file: runs/x/relay.token",
        "-----BEGIN PUBLIC KEY----- is fine, -----BEGIN SSH SIGNATURE----- too",
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOt/XsxKVNXPvfLgt7DGkhrqOM1GVxwaQ22Z/1bZOygr",
        "1.5 2.5 3.5 0.1234567890123456789 0.9876543210987654321 0.1 0.2",
    ],
)
def test_harmless_lines_pass(line: str) -> None:
    assert secret_kind(line) == ""


def test_transcripts_and_bundles_are_listed_not_quoted(run_dir: Path) -> None:
    quoted = {log.name for log in find_logs(run_dir / "artifacts") if log.quoted}
    assert not any(n.endswith((".bin", "openings.jsonl", "proof_bundle.json", "roots.jsonl")) for n in quoted)
    assert "full/p0r0/events.jsonl" in quoted
