"""Leaks of every kind that a log of tensors, keys and dumps can hold, and innocent logs, both from a seed."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable, Iterator

import numpy as np
import torch

EACH = 300
Make = Callable[[random.Random, np.random.Generator], str]


def _words(g: np.random.Generator, n: int) -> np.ndarray:
    return g.integers(-(2**63), 2**63 - 1, n, dtype=np.int64)


def _some(r: random.Random) -> int:
    return r.choice([4, 5, 8, 16, 33, 64, 200])


def _shaped(r: random.Random, values: np.ndarray) -> np.ndarray:
    return values.reshape(r.choice([(-1,), (2, -1), (1, -1), (-1, 1)])) if len(values) % 2 == 0 else values


def _torch_int(r: random.Random, g: np.random.Generator) -> str:
    text = repr(torch.from_numpy(_shaped(r, _words(g, _some(r)))))
    return text.replace("\n", "\\n") if r.random() < 0.2 else text


def _torch_float(r: random.Random, g: np.random.Generator) -> str:
    kind = r.choice([torch.float32, torch.float64, torch.float16, torch.bfloat16])
    return repr(torch.from_numpy(_shaped(r, g.normal(size=2 * _some(r)))).to(kind))


def _torch_float_shares(r: random.Random, g: np.random.Generator) -> str:
    return repr(torch.from_numpy(_shaped(r, _words(g, _some(r)).astype(np.float64))))


def _numpy_int(r: random.Random, g: np.random.Generator) -> str:
    made = _shaped(r, _words(g, _some(r)))
    return r.choice([repr, str])(made if r.random() < 0.5 else made.view(np.uint64))


def _numpy_float(r: random.Random, g: np.random.Generator) -> str:
    made = _shaped(r, g.normal(size=2 * _some(r)) * 10.0 ** r.randrange(-3, 4)).astype(
        r.choice([np.float32, np.float64])
    )
    return r.choice([repr, str, lambda a: str(a.tolist()), lambda a: str(list(a.ravel()))])(made)


def _numpy_float_shares(r: random.Random, g: np.random.Generator) -> str:
    return r.choice([repr, str])(_shaped(r, _words(g, _some(r)).astype(np.float64)))


def _column(r: random.Random, g: np.random.Generator) -> str:
    form = r.choice(["{}", "  {},", "x[{i}] = {}", "{i} {}", "INFO share {}"])
    return "\n".join(form.format(w, i=i) for i, w in enumerate(_words(g, max(6, _some(r)))))


def _hex_words(r: random.Random, g: np.random.Generator) -> str:
    words = [int(w) for w in _words(g, max(8, _some(r))).view(np.uint64)]
    width = r.choice([1, 2, 4, 8])
    form, join = r.choice([("{:016x}", " "), ("0x{:016x}", ", "), ("'{:#018x}'", ", "), ("{:016X}", " ")])
    rows = [words[i : i + width] for i in range(0, len(words), width)]
    ahead = r.choice(["", "{:08x}: ", "  ", "["])
    return "\n".join(ahead.format(i * 8 * width) + join.join(form.format(w) for w in row) for i, row in enumerate(rows))


def _hex_lines(r: random.Random, g: np.random.Generator) -> str:
    text = g.bytes(8 * max(32, _some(r))).hex()
    size = r.choice([128, 128, 128, 60, 64, 76, 32])
    return "\n".join(text[i : i + size] for i in range(0, len(text), size))


def _one_line_of_128(r: random.Random, g: np.random.Generator) -> str:
    return r.choice(["", "x0 ", "0x", "dump: ", '"W": "'])[:6] + g.bytes(64).hex()


def _hex_dump(r: random.Random, g: np.random.Generator) -> str:
    rows = [g.bytes(16) for _ in range(max(4, _some(r)))]
    if r.random() < 0.5:
        return "\n".join(f"{16 * i:08x}  {row.hex(' ')}" for i, row in enumerate(rows))
    return "\n".join(f"{16 * i:08x}: {row.hex(' ', 2)}  ................" for i, row in enumerate(rows))


def _base64_lines(r: random.Random, g: np.random.Generator) -> str:
    text = r.choice([base64.b64encode, base64.urlsafe_b64encode])(g.bytes(8 * max(24, _some(r)))).decode()
    size = r.choice([76, 76, 76, 64, 64, 70])
    ahead = r.choice(["", "", "  ", "2026-11-22 INFO ", "> "])
    return r.choice(["\n", "\n", "\\n"]).join(ahead + text[i : i + size] for i in range(0, len(text), size))


def _pem_body(r: random.Random, g: np.random.Generator) -> str:
    text = base64.b64encode(g.bytes(r.choice([121, 240, 600, 1190]))).decode()
    return "\n".join(text[i : i + 64] for i in range(0, len(text), 64))


def _bare_key(r: random.Random, g: np.random.Generator) -> str:
    text = g.bytes(32).hex()
    text = text.upper() if r.random() < 0.2 else text
    forms = ["{}", "0x{}", "key {}", "key={}", '{{"key": "{}"}}', "seed: {}", "b'{}'", "[debug] {}", "prg_key = 0x{}"]
    forms += ["mask {}", '"{}",', "pair secret {} of P1", "identity_seed={}", "got {} from the peer", "k0={}"]
    return r.choice(forms).format(text)


LEAKS: dict[str, Make] = {
    "torch repr, int64": _torch_int,
    "torch repr, floats": _torch_float,
    "torch repr, shares as floats": _torch_float_shares,
    "numpy repr, int64": _numpy_int,
    "numpy repr, floats": _numpy_float,
    "numpy repr, shares as floats": _numpy_float_shares,
    "integers one a line": _column,
    "16-digit hex words": _hex_words,
    "hex lines": _hex_lines,
    "one line of 128 hex digits": _one_line_of_128,
    "hex dump": _hex_dump,
    "base64 in lines": _base64_lines,
    "PEM body": _pem_body,
    "a bare 32-byte hex key": _bare_key,
}


def leaks(kind: str, seed: int = 7) -> Iterator[str]:
    r, g = random.Random(f"{kind} {seed}"), np.random.default_rng([seed, *kind.encode()])
    for _ in range(EACH):
        yield LEAKS[kind](r, g)


# ---- innocent logs: as this product's own runs write them, and what other programs write beside ------------


def innocent(seed: int = 7) -> dict[str, list[str]]:
    """Logs by name. Every hash is random, so that no rule can have learnt them."""
    r = random.Random(seed)
    h = lambda n=32: r.randbytes(n).hex()  # noqa: E731
    coords = [f"p{p}r{n}s0t0" for n in range(2) for p in range(3)]
    sig = base64.b64encode(r.randbytes(180)).decode()
    rows = [sig[i : i + 70] for i in range(0, len(sig), 70)]
    signature = "\n".join(["-----BEGIN SSH SIGNATURE-----", *rows, "-----END SSH SIGNATURE-----"])
    public = lambda: "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI" + base64.b64encode(r.randbytes(32)).decode()[:43]  # noqa: E731
    rsa = "ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAABgQ" + base64.b64encode(r.randbytes(380)).decode()
    ts = 1795318355.0
    events, beats, csv, full, table = [], [], ["step,loss,lr,toks_per_s,samples_per_s"], [], []
    for step in range(200):
        pairs = {c: h() for c in coords[1:3]}
        fields = {"coord": coords[0], "epoch": step, "root": h(), "pairs": pairs}
        events.append({"ts": ts + step * 0.3, "seq": step, "level": "info", "event": "epoch_root", "fields": fields})
        fields = {"step": step, "sha256": h(), "manifests": {str(p): h() for p in range(3)}}
        events.append({"ts": ts, "seq": step, "level": "info", "event": "checkpoint_committed", "fields": fields})
        loss, rate = 2.5 * r.random(), 400 * r.random()
        beats.append(
            {"ts": ts, "rank": 0, "coord": coords[0], "pid": 23801, "step": step, "phase": "train", "loss": loss}
        )
        beats[-1] |= {"toks_per_s": 0.0, "sent_bytes": 2124508 * step, "samples_per_s": rate, "mem_mib": 205.0}
        csv.append(f"{step},{loss:.9g},0.491666667,0,{rate:.9g}")
        full.append(f'[2026-11-22T03:32:{step % 60:02}.599Z] EVENT root {{"epoch":{step},"global_root":"0x{h()}"}}')
        full.append(f'[2026-11-22T03:32:{step % 60:02}.6Z] EVENT halt {{"nonce":"{h(8)}","mode":"hold"}}')
        table.append(f"| full/p0r0/file{step}.jsonl | {26521 * step} | `{h()}` | yes |")
        full.append(f"p0r0s0t0 0x{h()}<br>p1r0s0t0 0x{h()} | 0x{h()} |")
    result = {
        "run": "demo.full",
        "coord": coords[0],
        "result_hash": h(),
        "values": {"accuracy": 0.96},
        "signature": signature,
    }
    result |= {"root": h(), "sid_job": h(), "state_digests": [h(), h(), h()], "steps": 60, "ts": ts}
    policy = {"code_hash": h(), "inputs": {"commitments": [h(), h(), h()], "owner": h()}, "nonce": h(), "sid_job": h()}
    policy |= {"parties": [{"ed25519": public(), "x25519": h(), "party": p, "seeded": True} for p in range(3)]}
    policy |= {"reveal": ["loss", "accuracy"], "job": {"lr": 0.5, "betas": [0.9, 0.999], "seed": 7}}
    stack = []
    for thread in range(12):
        stack += [f"Thread 0x0000{r.randbytes(6).hex()} [worker {thread}] (most recent call first):"]
        stack += [f'  File "/usr/lib/python3.11/threading.py", line {n} in wait' for n in (324, 622, 995)] + [""]
    nccl = []
    for rank in range(24):
        head = f"pod:2{rank:03}:2{rank:03} [0] NCCL INFO"
        nccl += [
            f"{head} comm 0x55d3{r.randbytes(4).hex()} rank {rank} nranks 24 cudaDev 0 busId 1b000 commId 0x{h(8)}"
        ]
        nccl += [f"{head} Channel {rank:02}/24 :    0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15"]
    pip = [f"    --hash=sha256:{h()} \\" for _ in range(30)] + [
        f"Downloading torch-2.13.0-cp311.whl ({n}.4 MB)" for n in range(9)
    ]
    shapes = [f"layer {n}: weight torch.Size([{64 * n}, 784]) int64, strides [1, 64], scale 2^16" for n in range(20)]
    ns = [f"{1795318355123456789 + n * 1000},{n},all_reduce,{n * 3.5}" for n in range(50)]
    nested = json.dumps({"policy": policy, "result": result, "hashes": [h() for _ in range(9)]}, indent=1).splitlines()
    snapshot = json.dumps(
        {"epochs": [{"epoch": n, "global_root": h(), "replica_roots": [h()]} for n in range(9)]}, indent=2
    )
    wide = "/".join(f"Site-Packages{n}/torch/_C/TensorBase{n}" for n in range(12))
    return {
        "events.jsonl": [json.dumps(e, separators=(",", ":")) for e in events],
        "heartbeat_rank0.jsonl": [json.dumps(b, separators=(",", ":")) for b in beats],
        "training.csv": csv,
        "run_full.log": full,
        "files.md": table,
        "result.json": [json.dumps(result, separators=(",", ":"))],
        "policy.json": [json.dumps(policy, separators=(",", ":"))],
        "indented.json": nested,
        "dp_roots.json": snapshot.splitlines(),
        "run.info": [f"policy_hash: {h()}", f"sid_job: {h()}", f"code_hash: {h()}", f"git: {h(20)}", "job.lr: 0.5"],
        "SHA256SUMS": [f"{h()}  transcript_p0r0s0t0/f{n}" for n in range(40)],
        "signature.txt": signature.splitlines() * 5,
        "allowed_signers": [f'P{n % 3} namespaces="uvcc" {public()}' for n in range(30)] + [f"P0 {rsa}"],
        "identities.md": [f"| P{n % 3} | 0 | p{n % 3}r0 | local | 127.0.0.1:33653 | {public()} |" for n in range(24)],
        "stackdump.txt": stack,
        "nccl.log": nccl,
        "pip.log": pip,
        "shapes.log": shapes,
        "profile.csv": ns,
        "paths.log": [f"loading {wide}/x.so", "=" * 300, "-" * 200, "sha512 " + h(64), f"commit {h(20)}", h(16)],
        "uuid.log": [f"request {h(4)}-{h(2)}-{h(2)}-{h(2)}-{h(6)} took {n / 7:.3f} s" for n in range(60)],
        "fingerprints.log": [
            f"256 SHA256:{base64.b64encode(r.randbytes(33)).decode()[:43]} pod{n} (ED25519)" for n in range(20)
        ],
    }
