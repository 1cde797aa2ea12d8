#!/usr/bin/env python3
"""Check a UVCC package without any code of UVCC: Python's standard library and `ssh-keygen` are enough.

Usage: python3 -I verify.py [PATH] [--allowed-signers FILE] [--policy FILE].
PATH is an unpacked package, a run's artifacts, the folder of one phase, or a proof_bundle.json; without it, the folder
in which this file lies. FILE is an OpenSSH allowed_signers file with the keys of P0, P1, P2 (and `collector`) that
you got from their owners yourself, or a policy.json. Sections are those of EVIDENCE.md, which lies beside this file.
Exit codes: 0 verified; 1 something does not hold; 2 something cannot be read; holds as far as checked, but 3 nobody
said whose keys are expected, 4 no leaf was recomputed, 5 the full phase is missing, 6 no manifest of a known collector.
"""

from __future__ import annotations

import argparse, base64, csv, hashlib, json, math, os, re, stat, struct, subprocess, sys, tempfile, textwrap
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

MIB, HEAD, TAIL = 1024 * 1024, "-----BEGIN SSH SIGNATURE-----\n", "-----END SSH SIGNATURE-----\n"
BUNDLE, POLICY, SIGNATURES, MANIFEST = "proof_bundle.json", "policy.json", "policy_signatures.json", "MANIFEST.json"
OF_A_RUN = (MANIFEST, f"{MANIFEST}.sig", "run_full.jsonl", "run_full.log", "dp_layout.json")
FOR_POLICY, FOR_ROOT, FOR_RESULT, FOR_MANIFEST = "uvcc-policy", "uvcc-root", "uvcc-result", "uvcc-manifest"
THREE = "agreed: each domain runs its own pods (so the policy; no domain was asked: uvcc verify --domain asks); two"
NOTHING = "no product was proved: an altered one goes unnoticed"
PROOFS = "all three signed that every message between them was proved (sound if one domain at most is corrupt)"
PRODUCTS = ("all three signed that products and truncations were proved (sound if one domain at most is corrupt); "
            "not proved: comparisons, choices by bits, exponentials, look-ups and what is dealt for them")
COVERT = ("{} of {} domains' steps were drawn for an audit (1 in {} on average), all three signed that the proofs of "
          "these held (sound if one domain at most is corrupt); not proved: every other step")
OF_ONE_RUN = "that they are phases of one run is the collector's word"
APART = ("are of different proposals or attempts", "reveal different values", "are of different jobs")
CODES = {"pinned": 3, "transcripts": 4, "full": 5, "manifest": 6}
RECORD, HEADER = struct.Struct("<BBBBIIQQ32s"), struct.Struct("<8sIQ32s32s")
OPEN, RESHARE, DEALER, _, INPUT, RESULT, CHECKPOINT, AGREED, PIPELINE, START, PROOF, COIN, _, AUDIT = range(1, 15)
SHIPPED = dict(one.split(":") for one in (
    "logistic-digits:64 10,mlp-digits:64 32 10,mlp4-digits:64 32 32 32 10,mlp22-digits:64" + " 32" * 21 + " 10,"
    "cnn-digits:128 10,cnn-digits-norm:128 10,secureml-a:784 128 128 10,lenet:800 500 10,lenet-avg:800 500 10,"
    "alexnet-cifar:256 256 256 10,vgg16-cifar:512 256 256 10,gpt-tiny:16 64 16 27").split(","))
WIRE, LOCAL = (OPEN, RESHARE, DEALER, PROOF, COIN, AUDIT), (INPUT, RESULT, CHECKPOINT, AGREED, PIPELINE, START)
COORD = re.compile("p([012])r{0}s{0}t{0}".format("(0|[1-9][0-9]{0,5})"))
POD, POD_RESULT = re.compile(r"p[0-9]{1,6}r[0-9]{1,6}"), re.compile(r"result(?:_rank[0-9]{1,6})?\.json")
WORDS, HEX32, HEXES = re.compile("(?s).+"), re.compile("[0-9a-f]{64}"), re.compile("(?:[0-9a-f]{2})*")
Coord = tuple[int, int, int, int]  # replica, party, stage, tensor
Json = Any; SHOWN = re.compile("loss|val_(loss|accuracy|auc|precision|recall|perplexity|rmse|r2|overflow)")
LACKING = re.compile("val_(auc|precision|recall|perplexity|r2)")  # may come out as no number, and is not stated then
class Wrong(Exception): """Something was read, and it does not hold."""
class Unreadable(Exception): """Something is not there, or is not what it must be."""
BAD = (Unreadable, OSError, ValueError, MemoryError, RecursionError)
def sha(*parts: bytes) -> bytes: return hashlib.sha256(b"".join(parts)).digest()
def need(good: object, error: type[Exception], what: str) -> None:
    if not good: raise error(what)
def u32(value: int) -> bytes: return struct.pack("<I", value)
def same(what: str, stated: Json, found: Json) -> None:
    """Equal, and of equal type: to Python, 1, 1.0 and true are one number."""
    if stated != found or spelled(stated) != spelled(found):
        raise Wrong(f"{what} is {str(stated)[:200]}, recomputed {str(found)[:200]}")
def spelled(value: Json) -> str: return json.dumps(value, sort_keys=True, default=repr)
def name_of(c: Coord) -> str: return f"p{c[1]}r{c[0]}s{c[2]}t{c[3]}"
def coord_of(text: Json) -> Coord:
    found = COORD.fullmatch(text) if isinstance(text, str) else None
    if found is None: raise Unreadable(f"not a worker: {str(text)[:60]!r}")
    replica, party, stage, tensor = map(int, found.group(2, 1, 3, 4)); return replica, party, stage, tensor
def peers(party: int) -> list[int]: return [p for p in range(3) if p != party]
# ---- section 1: files and JSON -------------------------------------------------------------------------------------
def read(path: Path, most: int = 512 * MIB) -> bytes:
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
        found = os.fstat(file.fileno())
        need(stat.S_ISREG(found.st_mode) and found.st_size <= most, Unreadable, f"{path} is no file of {most} bytes")
        return file.read(most)
def refuse(text: str) -> NoReturn: raise ValueError(f"{text[:200]} is no evidence")
def finite(token: str) -> float: return float(token) if math.isfinite(float(token)) else refuse(token)
def number(value: float) -> str:
    if 1e-6 <= abs(value) < 1e21: return format(Decimal(repr(value)), "f").removesuffix(".0")
    return "0" if value == 0 else re.sub("e([+-])0", r"e\1", repr(value))
def once(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    return dict(pairs) if len(dict(pairs)) == len(pairs) else refuse("a key that is there twice")
def parse(data: bytes, what: object) -> Json:
    try:
        text = data.decode()
        if len(re.findall(r"[\[{,]", re.sub(r'"(?:[^"\\]|\\.)*"', "", text))) > 50_000 + len(data) // 16:
            raise ValueError("it holds more values than evidence of its size can")
        value = json.loads(text, parse_constant=refuse, parse_float=finite, object_pairs_hook=once,
                           parse_int=lambda n: int(n) if len(n) < 18 and abs(int(n)) < 2**53 else refuse(n))
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate cannot be written
    except (ValueError, RecursionError, MemoryError) as e:
        raise Unreadable(f"{what} is not JSON: {str(e)[:200]}") from e
    return value
def canonical(value: Json) -> bytes:
    """RFC 8785: keys in the order of their UTF-16 code units, numbers as ECMAScript prints them, no spaces."""
    if isinstance(value, dict):
        keys = sorted(value, key=lambda k: k.encode("utf-16-be"))
        return b"{" + b",".join(canonical(k) + b":" + canonical(value[k]) for k in keys) + b"}"
    if isinstance(value, list): return b"[" + b",".join(map(canonical, value)) + b"]"
    return (number(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)).encode()
def parse_canonical(data: bytes, what: object) -> Json:
    body = data[:-1] if data.endswith(b"\n") else data; value = parse(body, what)
    need(canonical(value) == body, Unreadable, f"{what} is not canonical JSON"); return value
def fit(value: Json, form: Any, what: str) -> Json:
    """The value, if it has the form: a dict of exactly these fields, a list ``[form]``, or what a function accepts."""
    if isinstance(form, re.Pattern): good: Any = isinstance(value, str) and form.fullmatch(value)
    elif isinstance(form, (dict, list)):
        good = isinstance(value, type(form)) and (isinstance(form, list) or set(value) == set(form))
        for name in (form if isinstance(form, dict) else range(len(value))) if good else ():
            fit(value[name], form[name] if isinstance(form, dict) else form[0], f"{what}.{name}")
    else: good = isinstance(value, form) if isinstance(form, type) else form(value)
    need(good, Unreadable, f"{what} is not as it must be: {str(value)[:80]!r}"); return value
def below(most: int, least: int = 0) -> Any: return lambda value: type(value) is int and least <= value < most
def numbers(value: Json) -> bool: return type(value) is dict and all(type(n) in (int, float) for n in value.values())
def plain(v: Json) -> bool: return type(v) is dict and all(isinstance(n, int | float | str) for n in v.values())
# ---- section 2: trees ----------------------------------------------------------------------------------------------
class Tree:  # RFC 9162 section 2.1.1
    def __init__(self) -> None: self.stack, self.size = list[bytes](), 0
    def add(self, leaf: bytes) -> None:
        size = self.size
        while size & 1: leaf, size = sha(b"\1", self.stack.pop(), leaf), size >> 1
        self.stack.append(leaf); self.size += 1
    def root(self) -> bytes:
        root = self.stack[-1] if self.stack else sha()
        for left in reversed(self.stack[:-1]): root = sha(b"\1", left, root)
        return root
def root_of_path(leaf: bytes, index: int, size: int, path: list[bytes]) -> bytes:
    """RFC 9162 section 2.1.3.2; nothing if the path has the wrong length."""
    at, last = index, size - 1
    for sibling in path:
        if last <= 0: return b""
        if at & 1 or at == last:
            leaf = sha(b"\1", sibling, leaf)
            while at and not at & 1: at, last = at >> 1, last >> 1
        else: leaf = sha(b"\1", leaf, sibling)
        at, last = at >> 1, last >> 1
    return leaf if last == 0 and index < size else b""
# ---- section 3: signatures -----------------------------------------------------------------------------------------
class Claim(NamedTuple): key: str; namespace: str; text: bytes; armored: str; what: str
def three(value: Json) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(isinstance(v, str) and HEX32.fullmatch(v) for v in value)
def key_line(value: Json) -> bool: return isinstance(value, str) and len(raw_key(value)) == 32
def string(data: bytes) -> bytes: return struct.pack(">I", len(data)) + data
def decoded(text: str) -> bytes:
    try: return base64.b64decode(text, validate=True)
    except ValueError: return b""
def raw_key(line: str) -> bytes:
    """The 32 bytes of an OpenSSH line in its one spelling; nothing for any other text."""
    raw = decoded(line.partition(" ")[2])[-32:]
    return raw if line == f"ssh-ed25519 {base64.b64encode(string(b'ssh-ed25519') + string(raw)).decode()}" else b""
def holds(claim: Claim) -> bool:
    """The armor is the one spelling of a signature by that key in that namespace, and ssh-keygen finds it good."""
    blob = decoded(claim.armored[len(HEAD) : -len(TAIL)].replace("\n", ""))
    key = string(string(b"ssh-ed25519") + string(raw_key(claim.key)))
    want = b"SSHSIG\0\0\0\1" + key + string(claim.namespace.encode()) + string(b"") + string(b"sha512")
    want += struct.pack(">I", 83) + string(b"ssh-ed25519") + struct.pack(">I", 64)
    body = base64.b64encode(blob).decode()
    lines = "".join(f"{body[i : i + 70]}\n" for i in range(0, len(body), 70))
    return blob[:-64] == want and claim.armored == HEAD + lines + TAIL and keygen(claim, "check-novalidate")
def keygen(claim: Claim, verb: str, *more: str) -> bool:
    with tempfile.NamedTemporaryFile("w", suffix=".sig") as file:
        file.write(claim.armored); file.flush()
        command = ["ssh-keygen", "-Y", verb, "-n", claim.namespace, "-s", file.name, *more]
        return subprocess.run(command, input=claim.text, capture_output=True, check=False).returncode == 0
def check_claims(claims: list[Claim]) -> None:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for claim, good in zip(claims, pool.map(holds, claims), strict=True):
            need(good, Wrong, f"the signature of {claim.what} does not hold")
def named(who: str, line: str) -> bool:
    """Whether a line of the reader's file is of somebody, to OpenSSH: a pattern fits, and none with a ``!`` does."""
    found, glob = re.match(r'[ \t]*(?:"([^"]*)"|([^"# \t][^ \t]*))[ \t]', line), {"*": ".*", "?": "."}
    def fits(name: str) -> Any: return re.fullmatch("".join(glob.get(c) or re.escape(c) for c in name), who)
    good = [n[:1] for n in (found[1] or found[2] or "").split(",") if fits(n.removeprefix("!"))] if found else []
    return bool(good) and "!" not in good
def check_pinned(signers: Path | None, who: str, claims: list[Claim]) -> None:
    """The reader's own file lets this key sign as ``who`` in the namespaces of these claims: ssh-keygen decides."""
    for claim in {c.namespace: c for c in claims}.values() if signers is not None else ():
        if not keygen(claim, "verify", "-f", str(signers), "-I", who):
            raise Wrong(f"{signers} does not let {claim.key} sign as {who} under {claim.namespace}")
# ---- section 4: the policy -----------------------------------------------------------------------------------------
IDENTITY = {"ed25519": key_line, "x25519": HEX32, "seeded": bool}
PARTY = {**IDENTITY, "party": object, "provider": WORDS, "region": WORDS}
SIZES = {"replicas": 65_536, "stages": 255, "tensor": 65_535, "microbatches": 65_536}
AGREEMENT = {
    **dict.fromkeys(("model_hash", "code_hash", "nonce"), HEX32), "version": below(4, 3), "job": dict, "limits": plain,
    "topology": {name: below(most + 1, 1) for name, most in SIZES.items()}, "operation": dict, "parties": [dict],
    "inputs": dict, "reveal": [{"value": WORDS, "to": WORDS}]}
BEGUN = {**dict.fromkeys(("commit", "of", "root"), HEX32), "step": below(2**53, 1), "restored": object}
class Policy:
    def __init__(self, data: Json) -> None:
        self.data, self.text = fit(data, AGREEMENT, "the policy"), canonical(data)
        self.hash = sha(self.text); self.sid = sha(b"UVCC_SID_JOB_V1", self.hash)
        self.replicas, self.stages, self.tensor = (data["topology"][n] for n in ("replicas", "stages", "tensor"))
        self.who, own = "three" if "proposal" in data["inputs"] else "one", self.replicas * self.stages * self.tensor
        if data["operation"] != {"operators": self.who, "party_traffic": "sealed" if own > 1 else "none"}:
            raise Unreadable("policy.operation is not what a run of this size does")
        job = data["job"]; fit(job.get("kind"), WORDS, "job.kind")
        self.verify = fit(job.get("verify", "off"), ["off", "products", "proofs", "covert"].__contains__, "job.verify")
        self.one_in = fit(job.get("audit_one_in", 10), below(101, 2), "job.audit_one_in")
        need(self.verify == "covert" or self.one_in == 10, Unreadable, "job.audit_one_in belongs to verify: covert")
        self.proves, self.steps = self.verify != "off", fit(job.get("steps"), below(2**53, 1), "job.steps")
        each = (("loss_every", 1), ("val_every", 0), ("patience", 0))
        self.every, self.validated, self.patience = (fit(job.get(n, m), below(2**53, m), f"job.{n}") for n, m in each)
        self.listed, self.form = fit(job.get("reveal", ["loss", "accuracy"]), [object], "job.reveal"), tuple[Any, ...]()
        if job.get("kind") == "private" and "model" in job and "batch" in job:
            rows = [fit(n, below(2**53, 1), "batch or test_rows") for n in (job["batch"], job.get("test_rows", 360))]
            self.form = dense_layers(job["model"]), *rows
        self.start, self.first = b"", 0
        if job.get("start") is not None:
            begun = fit(job["start"], BEGUN, "job.start")
            self.first, self.start = begun["step"], canonical({n: begun[n] for n in ("commit", "of", "step")})
            if self.first >= self.steps or spelled(begun["restored"]) not in ("[]", "[0]", "[1]", "[2]"):
                raise Unreadable("job.start leaves nothing to do, or hands over more than one party")
        proposed = {"proposal": HEX32, "attempt": below(2**31)} if "proposal" in data["inputs"] else {}
        inputs = {"owner": WORDS, "commitments": three, **proposed}
        self.commitments = fit(data["inputs"], inputs, "policy.inputs")["commitments"]
        pairs = [(one["value"], one["to"]) for one in data["reveal"]]
        self.public = {value for value, to in pairs if to == "all"}
        self.shown = {n for n in self.public if n in self.listed and SHOWN.fullmatch(n)}
        self.keys = [self._keys(p, one) for p, one in enumerate(data["parties"])]
        people = [one for p in data["parties"] for one in (p, *p.get("pods", ()))]
        every = [one[kind] for kind in ("ed25519", "x25519") for one in people]
        if len(self.keys) != 3 or len(set(every)) != len(every) or len(set(pairs)) != len(pairs):
            raise Unreadable("the policy has not three parties, or a key or a value to reveal stands twice in it")
        self.seeded = any(one["seeded"] for one in people)
    def _keys(self, party: int, one: Json) -> list[str]:
        pods = fit(one, {**PARTY, "pods": [IDENTITY]} if "pods" in one else PARTY, f"party {party}").get("pods", [])
        if spelled(one["party"]) != str(party) or ("pods" in one and len(pods) != max(self.replicas - 1, 1)):
            raise Unreadable(f"party {party} has another number, or not one pod for each replica after the first")
        return [one["ed25519"], *(pod["ed25519"] for pod in pods)]
    def key(self, c: Coord) -> str: return self.keys[c[1]][c[0] if len(self.keys[c[1]]) > 1 else 0]
    def sid_rep(self, replica: int) -> bytes: return sha(b"UVCC_SID_REPLICA_V1", self.sid, u32(replica))
    def sid_sub(self, c: Coord) -> bytes: return sha(b"UVCC_SID_SUB_V1", self.sid_rep(c[0]), struct.pack("<BH", *c[2:]))
    def values(self, epoch: int) -> list[str]:
        step, last = self.first + epoch, self.data["job"]["steps"] - 1
        loss, val = (step == last or (n and (step + m) % n == 0) for n, m in ((self.every, 0), (self.validated, 1)))
        return sorted(n for n in self.shown if (val if n[:4] == "val_" else loss)) if step < self.steps else []
# ---- section 5: leaves ---------------------------------------------------------------------------------------------
def summarise(file: Any, leaves: int, sid: bytes, epoch: int, me: int, seen: list[int]) -> dict[str, Json]:
    """What a worker signs about an epoch, from its records: their order and roles, the tree, what two ends share.
    ``seen`` is made of its messages: how many of kind RESHARE and OPEN, and all bytes."""
    mark, tree, opened, last = sid + u32(epoch), Tree(), 0, tuple[int, ...]()
    flows = {(a, b): hashlib.sha256(b"UVCC_FLOW_V1" + mark) for a in range(3) for b in range(3)}
    roles = {(0, me, me): LOCAL, **{(0, me, p): WIRE for p in peers(me)}, **{(1, p, me): WIRE for p in peers(me)}}
    for _ in range(leaves):
        direction, kind, src, dst, op, chunk, stream, size, _ = RECORD.unpack(record := file.read(RECORD.size))
        key = (stream, op, chunk, direction, src, dst, kind)
        if key <= last or kind not in roles.get((direction, src, dst), ()):
            raise Wrong(f"epoch {epoch} of P{me}: leaf {key} is out of order, there twice, or none of this party")
        last = key; tree.add(sha(b"\0UVCC_LEAF_V1", mark, record))
        flows[src, dst].update(record[1:]); opened += src == dst and kind != PIPELINE
        if src != dst: seen[:] = seen[0] + (kind == RESHARE), seen[1] + (kind == OPEN), seen[2] + size
    ends = {p: (min(p, me), max(p, me)) for p in peers(me)}
    pairs = {str(p): sha(b"UVCC_PAIR_DIGEST_V1", flows[a, b].digest(), flows[b, a].digest()).hex()
             for p, (a, b) in ends.items()}
    return {"leaves": leaves, "opened": opened, "pairs": pairs, "root": tree.root().hex()}
def check_leaves(path: Path, policy: Policy, worker: Worker) -> int:
    """Section 5.2: one block per epoch, each as its worker signed it. Returns how many leaves there are."""
    sid, done, total = policy.sid_sub(worker.coord), 0, 0
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        left = os.fstat(file.fileno()).st_size
        while head := file.read(HEADER.size):
            need(len(head) == HEADER.size and head[:8] == b"UVCCEPO1", Unreadable, f"{path}: no epoch begins here")
            _, epoch, leaves, owner, root = HEADER.unpack(head)
            left -= HEADER.size + leaves * RECORD.size
            need(left >= 0, Unreadable, f"{path} is cut short in epoch {epoch}")
            need(done < len(worker.roots) and (epoch, owner) == (done, sid), Wrong, f"{path}: {epoch} is not the next")
            stated, where = worker.roots[done], f"epoch {epoch} of {worker.name}"
            same(f"the file's count and root of {where}", [leaves, root.hex()], [stated["leaves"], stated["root"]])
            worker.seen.append([0, 0, 0])
            found = summarise(file, leaves, sid, epoch, worker.coord[1], worker.seen[-1])
            same(f"what is signed of {where}", {name: stated[name] for name in found}, found)
            done, total = done + 1, total + leaves
    same(f"epochs in {path}", done, len(worker.roots)); return total
# ---- sections 6 to 9: what a bundle says ---------------------------------------------------------------------------
STATED = {"coord": str, "head": HEX32, "root": HEX32, "sid_job": HEX32, "version": below(3, 2), "seen": object,
          "values": numbers}
VERDICT = {"claims": below(2**32), "coins": HEX32, "digest": HEX32}; DRAWN = {"drawn": re.compile("[0-9a-f]{48}")}
EPOCH = {"epoch": below(2**32), "leaves": below(2**48), "opened": below(2**32), "pairs": object}
OUTCOME = {"epochs": below(2**32), "result_hash": HEX32, "state_digests": three, "steps": below(2**32)}
OPENED = {"blind": HEX32, "epoch": below(2**32), "index": below(2**48), "payload": HEXES, "proof": [HEX32],
          "record": re.compile("[0-9a-f]{120}")}
WHOLE = {"epochs": [{"epoch": below(2**32), "global_root": HEX32, "replica_roots": [HEX32]}], "policy": object,
         "format": re.compile("uvcc-proof-bundle-v2"), "policy_signatures": dict.fromkeys("012", str),
         "run_root": HEX32, "result_hashes": [HEX32],
         "workers": [{"coord": str, "openings": [OPENED], "result": object, "roots": [object]}]}
def line_of(one: Json) -> bytes: return canonical({n: one[n] for n in ("signature", "statement")}) + b"\n"
class Worker:
    """One worker's part of a bundle: ``roots`` are the statements of its epochs, ``last`` that of its result."""
    def __init__(self, data: Json) -> None:
        self.coord, self.openings, self.data, self.name = coord_of(data["coord"]), data["openings"], data, data["coord"]
        self.roots = [self.read(one, STATED | EPOCH) for one in data["roots"]]
        self.last, self.seen = self.read(data["result"], STATED | OUTCOME), list[list[int]]()  # seen: see summarise
        self.core = canonical({name: self.last[name] for name in ("sid_job", "state_digests", "steps", "values")})
        hashed = sha(b"UVCC_RESULT_V1", self.core).hex()
        need(self.last["result_hash"] == hashed, Unreadable, f"the result hash of {self.name} is not of its fields")
        self.lines = [b"".join(map(line_of, data["roots"])), line_of(data["result"])]
        self.lines.append(b"".join(canonical(one) + b"\n" for one in self.openings))
    def read(self, one: Json, form: dict[str, Any]) -> Json:
        proved = fit(fit(one, dict, self.name).get("statement"), dict, self.name).get("proved")
        verdict = VERDICT | DRAWN if type(proved) is dict and "drawn" in proved else VERDICT
        proof = {"proved": verdict} if "epoch" in form and proved is not None else {}
        s = fit(one, {"signature": str, "statement": form | proof}, f"a statement of {self.name}")["statement"]
        others = dict.fromkeys(map(str, peers(coord_of(s["coord"])[1])), HEX32)
        fit(s["seen"], others if s.get("epoch", 1) else {}, f"seen of {self.name}")
        fit(s.get("pairs", {}), others if "pairs" in s else {}, f"pairs of {self.name}"); return s
class Bundle:
    """A well-formed bundle, signed by the three parties of its policy; :meth:`check` says whether it holds."""
    def __init__(self, path: Path, signers: Path | None, expected: Policy | None, main: bool) -> None:
        self.data = data = fit(parse_canonical(read(path), path), WHOLE, "the bundle")
        self.policy = p = Policy(data["policy"])
        if expected is not None:
            same("the policy's keys", [keys[0] for keys in p.keys], [keys[0] for keys in expected.keys])
            same("the policy's hash", p.hash.hex(), expected.hash.hex() if main else p.hash.hex())
        texts = data["policy_signatures"]
        self.claims = [Claim(p.keys[i][0], FOR_POLICY, p.text, texts[str(i)], f"the policy by P{i}") for i in range(3)]
        check_claims(self.claims); self.workers = [Worker(one) for one in data["workers"]]
        self.at, n = {w.coord: w for w in self.workers}, (range(p.replicas), range(3), range(p.stages), range(p.tensor))
        same("the workers", [w.name for w in self.workers], [name_of(c) for c in product(*n)])
        self.length, least, waited = len(self.workers[0].roots), math.inf, 0
        for s in self.workers[0].roots:  # section 7: the training ends where its validation has not fallen for long
            if (loss := s["values"].get("val_loss")) is not None:
                least, waited = (loss, 0) if loss < least else (least, waited + 1)
                if 0 < p.patience <= waited: p.steps = p.first + s["epoch"] + 1; break
        need(self.length - p.steps + p.first in (0, 1), Wrong, f"{self.length} epochs for {p.steps - p.first} steps")
        for w in self.workers:
            same(f"the epochs of {w.name}", [s["epoch"] for s in w.roots], list(range(self.length)))
            signed = [(one, FOR_ROOT) for one in w.data["roots"]] + [(w.data["result"], FOR_RESULT)]
            for one, namespace in signed:
                s, what = one["statement"], f"{w.name} of epoch {one['statement'].get('epoch', 'last')} ({namespace})"
                self.claims.append(Claim(p.key(w.coord), namespace, canonical(s), one["signature"], what))
        for i in range(3): check_pinned(signers, f"P{i}", [c for c in self.claims if c.key == p.keys[i][0]])
    def mates(self, w: Worker) -> list[Worker]: return [self.at[w.coord[0], p, *w.coord[2:]] for p in range(3)]
    def audits(self) -> tuple[int, int, int]:
        """How many domains' steps were audited, of how many, and one in how many was due (section 7)."""
        verdicts = [s["proved"] for w in self.workers if w.coord[1] == 0 for s in w.roots if "proved" in s]
        drawn = [int(v["drawn"][at : at + 16], 16) for v in verdicts if "drawn" in v for at in (0, 16, 32)]
        return sum(one * self.policy.one_in < 2**64 for one in drawn), len(drawn), self.policy.one_in
    def check(self) -> None:
        for w in self.workers: self._statements(w, self.mates(w), self.workers[0])
        check_claims(self.claims[3:])
        for w in self.workers:
            self._openings(w)
            if w.coord[1] == 0: self._history(self.mates(w))
        same("the result hashes", self.data["result_hashes"], sorted({w.last["result_hash"] for w in self.workers}))
        p, tree, found = self.policy, Tree(), []
        for e in range(self.length):
            tops = []
            for r in range(p.replicas):
                own = [bytes.fromhex(w.roots[e]["root"]) for w in self.workers if w.coord[0] == r]
                tops.append(sha(b"UVCC_REPLICA_ROOT_V1", p.sid_rep(r), u32(e), *own))
            top = sha(b"UVCC_GLOBAL_ROOT_V1", p.sid, u32(e), *tops); tree.add(sha(b"\0", top))
            found.append({"epoch": e, "global_root": top.hex(), "replica_roots": [one.hex() for one in tops]})
        same("the epochs", self.data["epochs"], found); same("the run root", self.data["run_root"], tree.root().hex())
    def _statements(self, w: Worker, mates: list[Worker], first: Worker) -> None:
        """What a worker signed agrees with the policy, with its peers' ends, and with the values of the others."""
        p, others = self.policy, [mates[i] for i in peers(w.coord[1])]
        for e, s in enumerate(w.roots):
            where = f"epoch {e} of {w.name}"
            same(f"worker and job in {where}", [s["coord"], s["sid_job"]], [w.name, p.sid.hex()])
            same(f"what {where} reveals", sorted({*s["values"], *filter(LACKING.fullmatch, p.values(e))}), p.values(e))
            same(f"the values of {where}", s["values"], first.roots[e]["values"])
            same(f"the verdict of {where}", s.get("proved"), mates[0].roots[e].get("proved"))
            due = p.first + e < p.steps or set(first.last["values"]) - {"loss"}
            good = ("proved" in s) == p.proves and (not p.proves or not due or s["proved"]["claims"])
            need(good, Wrong, f"{where} does not state the proof that the policy wants of it")
            same(f"draw of {where}", "drawn" in s.get("proved", ()), p.verify == "covert" and s["proved"]["claims"] > 0)
            theirs = {str(m.coord[1]): m.roots[e]["pairs"][str(w.coord[1])] for m in others}
            same(f"the messages of {where}, by peer", s["pairs"], theirs)
            before = {str(m.coord[1]): m.roots[e - 1]["root"] for m in others} if e else {}
            same(f"the peers' roots seen in {where}", s["seen"], before)
        wanted = [w.name, p.sid.hex(), self.length, w.roots[-1]["root"], p.steps]
        same(f"the result of {w.name}", [w.last[k] for k in ("coord", "sid_job", "epochs", "root", "steps")], wanted)
        need(set(w.last["values"]) <= p.public, Wrong, f"{w.name} reveals what the policy does not list")
        same(f"the values in the result of {w.name}", w.last["values"], first.last["values"])
        same(f"the result hash of {w.name}", w.last["result_hash"], mates[0].last["result_hash"])
        same(f"seen in the result of {w.name}", w.last["seen"], {str(m.coord[1]): m.roots[-1]["root"] for m in others})
    def _history(self, three: list[Worker]) -> None:
        """Section 6.3: every head is that of all that the three signed before."""
        tree, sid = Tree(), self.policy.sid_sub(three[0].coord)
        for e in range(self.length + 1):
            row = [w.roots[e] if e < self.length else w.last for w in three]
            same(f"the heads of {three[0].name} and its peers", [s["head"] for s in row], [tree.root().hex()] * 3)
            tree.add(sha(b"\0UVCC_EPOCH_LEAF_V1", sid, u32(e), *(sha(canonical(s)) for s in row)))
    def _openings(self, w: Worker) -> None:
        """Section 9: every opened leaf is in a signed root and says what it must, and none that is due lacks."""
        p, me, seen = self.policy, w.coord[1], [(o["epoch"], o["index"]) for o in w.openings]
        if seen != sorted(set(seen)) or any(e >= self.length for e, _ in seen):
            raise Wrong(f"the opened leaves of {w.name} are not in order, or of no epoch")
        due = {AGREED: p.hash, INPUT: bytes.fromhex(p.commitments[me]), RESULT: w.core, START: p.start}; kinds = []
        for o in w.openings:
            record, payload, e = bytes.fromhex(o["record"]), bytes.fromhex(o["payload"]), o["epoch"]
            direction, kind, src, dst, op, _, _, size, digest = RECORD.unpack(record)
            where = f"an opened leaf in epoch {e} of {w.name}"
            good = (direction, src, dst) == (0, me, me) and kind in LOCAL and kind != PIPELINE
            need(good, Wrong, f"{where} is none of this party")
            leaf = sha(b"\0UVCC_LEAF_V1", p.sid_sub(w.coord), u32(e), record)
            root = root_of_path(leaf, o["index"], w.roots[e]["leaves"], [bytes.fromhex(one) for one in o["proof"]])
            same(f"the root with {where}", w.roots[e]["root"], root.hex())
            same(f"size and digest of {where}", [size, digest], [len(payload), sha(bytes.fromhex(o["blind"]), payload)])
            if kind == CHECKPOINT:
                found = re.fullmatch(rb'\{"sha256":"[^"\\]*","step":([0-9]+)\}', payload)
                need(found and found[1] == str(op).encode(), Wrong, f"{where} names no checkpoint of step {op}")
            elif payload != due[kind]:
                raise Wrong(f"{where}, of kind {kind}, is {payload.hex()[:80]}, not {due[kind].hex()[:80]}")
            kinds.append((kind, e))
        for e, s in enumerate(w.roots):
            same(f"opened leaves in epoch {e} of {w.name}", s["opened"], sum(at == e for at, _ in seen))
        for kind, at in ((AGREED, [0]), (START, [0] if p.start else []), (INPUT, [0]), (RESULT, [self.length - 1])):
            same(f"epochs with a leaf of kind {kind} of {w.name}", [e for k, e in kinds if k == kind], at)
# ---- sections 10 to 12: files beside a bundle ----------------------------------------------------------------------
def tree_of(root: Path) -> dict[str, Path]:
    """Every file below a folder by its name from there, links among them; a folder that cannot be listed is refused."""
    found: list[Path] = []
    for folder, folders, names in os.walk(root, onerror=lambda e: refuse(f"{e.filename}, which cannot be listed,")):
        found += [Path(folder) / name for name in names + [f for f in folders if (Path(folder) / f).is_symlink()]]
    return {path.relative_to(root).as_posix(): path for path in found}
def check_transcripts(bundle: Bundle, files: dict[str, Path]) -> int:
    """Section 10: the workers' own folders. Returns how many leaves were recomputed; -1 if none lie here."""
    folders = {path.parent for name, path in files.items() if "transcript_" in name}
    found = {coord_of(f.name[11:]): f for f in sorted(folders) if f.name.startswith("transcript_")}
    if not found: return -1
    good, total = len(found) == len(folders) and set(found) == set(bundle.at), 0
    need(good, Wrong, "the transcripts are not exactly those of the policy's workers")
    for w in bundle.workers:
        home = found[w.coord]
        for name, wanted in zip(("roots.jsonl", "result.json", "openings.jsonl"), w.lines, strict=True):
            same(f"{home / name}", hashlib.sha256(read(home / name)).hexdigest(), sha(wanted).hex())
        mates = [bundle.mates(w)[p] for p in peers(w.coord[1])]
        due = sorted(line for m in mates for line in m.lines[0].splitlines(keepends=True))
        said = sorted(read(home / "peers.jsonl").splitlines(keepends=True))
        need(said == due, Wrong, f"{home / 'peers.jsonl'} is not what the peers of {w.name} signed")
        odd = (home / "contradictions.jsonl").exists() and read(home / "contradictions.jsonl")
        need(not odd, Wrong, f"{w.name} kept statements that contradict each other")
        total += check_leaves(home / "leaves.bin", bundle.policy, w)
    if bundle.policy.form: check_form(bundle, bundle.policy)
    return total
def check_form(bundle: Bundle, p: Policy) -> None:
    """Section 5.3: every epoch has at least the messages that no run of the agreed program can do without."""
    (layers, batch, tested), task = p.form, p.data["job"].get("task"); train = task not in ("infer", "serve")
    width, weights = sum(out for _, out in layers), sum((i + 1) * out for i, out in layers)
    measured = any(n in ("confusion", "inertia") or (n != "loss" and SHOWN.fullmatch(f"val_{n}")) for n in p.listed)
    for e, party in product(range(bundle.length), range(3)):
        left, opened = p.steps - p.first - e, 0
        rows = tested // p.replicas if left < 1 else batch if train or (left > 1 and task != "serve") else 1
        least = [len(layers), 0, 8 * (rows * width + (weights // p.replicas if train and left > 0 else 0))]
        for r in range(p.replicas):
            found = list(map(sum, zip(*(w.seen[e] for w in bundle.workers if w.coord[:2] == (r, party)), strict=True)))
            good = all(map(int.__ge__, found, least)) or (left < 1 and not measured)
            need(good, Wrong, f"epoch {e}: P{party} of replica {r} has {found}, the program takes at least {least}")
            opened += found[1]
        due = p.values(e) if left > 0 else measured
        need(opened or not due, Wrong, f"epoch {e}: P{party} has no OPEN message, though a value was revealed")
def dense_layers(model: Json) -> list[list[int]]:
    """(inputs, outputs) of the dense layers that a job's model surely has."""
    named = isinstance(model, str) and model[:1] != "{"
    found: Json = list(map(list, pairwise(map(int, SHIPPED.get(model, "1 1").split())))) if named else []
    waiting = [parse(model.encode(), "job.model") if isinstance(model, str) and not named else model]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict) and value.get("type") == "dense":
            found.append([value.get("inputs"), value.get("outputs")])
        elif isinstance(value, (dict, list)):
            waiting += value.values() if isinstance(value, dict) else value
    return [both for both in found if all(map(below(2**31, 1), both))] or [[1, 1]]
def check_derived(folder: Path, bundle: Bundle) -> None:
    """Section 11: whatever lies beside a bundle and follows from it says the same."""
    p, data, last = bundle.policy, bundle.data, bundle.data["epochs"][-1]
    homes = [folder, *sorted(f for f in folder.iterdir() if POD.fullmatch(f.name))]
    for home in homes:
        if os.path.lexists(home / POLICY): same(f"{home / POLICY}", read(home / POLICY).removesuffix(b"\n"), p.text)
        if os.path.lexists(home / SIGNATURES):
            same(str(home / SIGNATURES), parse(read(home / SIGNATURES), SIGNATURES), data["policy_signatures"])
    sids, hx = [p.sid_rep(r).hex() for r in range(p.replicas)], "0x{}".format
    of_run = {"sid_job_hex": hx(p.sid.hex()), "run_root_hex": hx(data["run_root"])}
    roots = {e["epoch"]: [[hx(w.roots[e["epoch"]]["root"]) for w in bundle.workers if w.coord[0] == r]
                          for r in range(p.replicas)] for e in data["epochs"]}
    epochs = [{"epoch": e["epoch"], "replica_epoch_roots_hex": roots[e["epoch"]],
               "global_root_hex": hx(e["global_root"]), "replica_roots_hex": [hx(h) for h in e["replica_roots"]]}
              for e in data["epochs"]]
    tops = [{"replica": r, "sid_rep_hex": hx(sids[r]), "replica_root_hex": hx(h)}
            for r, h in enumerate(last["replica_roots"])]
    subs = [{"replica": w.coord[0], "stage": w.coord[2], "tensor": w.coord[3], "subsession_root_hex": hx(sha(
                b"UVCC_SUB_ROOT_V1", p.sid_sub(w.coord), u32(last["epoch"]),
                *(bytes.fromhex(mate.roots[-1]["root"]) for mate in bundle.mates(w))).hex())}
            for w in bundle.workers if w.coord[1] == 0]
    size = {"R": p.replicas, "S": p.stages, "T": p.tensor, "M": p.data["topology"]["microbatches"]}
    made = {"dp_roots.json": of_run | {"epochs": epochs, "replicas": [
                {"replica_id": r, "sid_rep_hex": hx(sid)} for r, sid in enumerate(sids)]},
            "audit_bundle.json": of_run | {"step_id": last["epoch"], "topology": size, "replica_roots": tops,
                                           "subsession_roots": subs, "global_root_hex": hx(last["global_root"])}}
    for name, value in made.items():
        same(str(folder / name), parse(read(folder / name), name) if (folder / name).exists() else value, value)
    for path in (path for home in homes[1:] for path in sorted(home.iterdir())):
        if POD_RESULT.fullmatch(path.name):
            found = parse(read(path), path)
            w = bundle.at.get(coord_of(found.get("coord") if isinstance(found, dict) else None))
            if w is None: raise Wrong(f"{path} is of no worker")
            said = json.loads(canonical({k: v for k, v in found.items() if k not in ("run", "ts")}))  # 3.0 is 3 there
            same(f"{path}", said, {**w.last, "signature": w.data["result"]["signature"]})
        elif path.name in ("training.csv", "val.csv"): check_table(path, bundle)
def check_table(path: Path, bundle: Bundle) -> None:
    p, first, of = bundle.policy, bundle.workers[0], "val_" if path.name == "val.csv" else ""
    signed = {p.first + 1 + s["epoch"]: s["values"] for s in first.roots}
    signed[p.steps] = {**signed.get(p.steps, {}), **{n: v for n, v in first.last["values"].items() if n == "loss"}}
    try:
        rows = csv.DictReader(read(path, 64 * MIB).decode().splitlines())
        once([(name, 0) for name in rows.fieldnames or []])
        for row in rows:
            read_here = [(n, c) for n, c in row.items() if c and (n != "step" if of else n in ("loss", None))]
            step, cells = int(row["step"]), {of + n: float(c) for n, c in read_here}  # None: a cell too many
            due = {n: v for n, v in signed.get(step, {}).items() if (n[:4] == of if of else n == "loss")}
            odd = due.keys() != (cells if of else {"loss": cells["loss"]}).keys() and step > p.first
            need(not odd, Wrong, f"{path} names {sorted(cells)} after step {step}, signed are {sorted(due)}")
            good = all(math.isclose(cells[n], v, rel_tol=1e-8, abs_tol=1e-12) for n, v in due.items())
            need(good, Wrong, f"{path} says {cells} after step {step}, signed is {due}")
    except (KeyError, TypeError, ValueError, csv.Error) as e:
        raise Unreadable(f"{path} is no table of training: {e}") from e
def check_manifest(root: Path, signers: Path | None, bundles: dict[str, Bundle], files: dict[str, Path]) -> str:
    """Section 12: no file was changed, added or removed since the collector signed. Returns what lacks, or ""."""
    if not (own := {MANIFEST, f"{MANIFEST}.sig"}) & set(files): return "there is no manifest"
    need(own <= set(files), Wrong, f"{MANIFEST} or its signature is missing")
    data, armored = read(root / MANIFEST), read(root / f"{MANIFEST}.sig", 4096).decode()
    blob = decoded(armored[30:-28].replace("\n", "")); key = f"ssh-ed25519 {base64.b64encode(blob[14:65]).decode()}"
    whole = armored.startswith(HEAD) and blob[:6] == b"SSHSIG" and len(blob) > 128 and key_line(key)
    need(whole, Unreadable, f"{MANIFEST}.sig is no signature")
    need(holds(claim := Claim(key, FOR_MANIFEST, data, armored, MANIFEST)), Wrong, f"{MANIFEST} is not what was signed")
    entry = {"bytes": below(2**53), "path": WORDS, "sha256": HEX32}
    form = {"collector": str, "files": [entry], "format": re.compile("uvcc-manifest-v1"), "run": str, "phases": dict}
    found = fit(parse_canonical(data, MANIFEST), form, MANIFEST); same("the collector", found["collector"], key)
    lines = read(signers, MIB).decode(errors="replace").split("\n") if signers is not None else []
    check_pinned(signers if (known := any(named("collector", line) for line in lines)) else None, "collector", [claim])
    listed, there = {one["path"]: one for one in found["files"]}, set(files) - own
    need(not (odd := sorted(there ^ set(listed))), Wrong, f"added or removed since it was signed: {', '.join(odd[:9])}")
    same("the list of files", sorted(there), [one["path"] for one in found["files"]])
    for name, one in listed.items():
        good = stat.S_ISREG((now := os.lstat(files[name])).st_mode) and now.st_size == one["bytes"]
        need(good, Wrong, f"{name} is no file of {one['bytes']} bytes")
        with files[name].open("rb") as file: found_here = hashlib.file_digest(file, "sha256").hexdigest()
        same(f"SHA-256 of {name}", one["sha256"], found_here)
    for phase, b in bundles.items():
        ids = {"policy_hash": b.policy.hash.hex(), "sid_job": b.policy.sid.hex()}
        same(f"the manifest's phase {phase}", found["phases"].get(phase), ids)
    return "" if known else f"nobody says whose key {found['collector']} is"
# ---- what PATH names, and the verdict ------------------------------------------------------------------------------
def find(path: Path) -> tuple[Path | None, dict[str, Path], str]:
    """The folder that a manifest covers, the phases' bundles, and the phase that decides."""
    if not path.is_dir() or (path / BUNDLE).exists():
        bundle = path / BUNDLE if path.is_dir() else path
        inside = bundle.name == BUNDLE and any((bundle.parent.parent / name).exists() for name in OF_A_RUN)
        return (bundle.parent.parent, {bundle.parent.name: bundle}, "") if inside else (None, {"": bundle}, "")
    for root in (path / "artifacts", path):
        if phases := {f.parent.name: f for f in sorted(root.glob(f"*/{BUNDLE}"))}: return root, phases, "full"
    raise Unreadable(f"{path} holds no {BUNDLE}")
def say(*lines: str, out: Any = None) -> None:
    """Print lines, each of them one: what a terminal obeys is spelled out. No word is broken at a terminal's edge."""
    out = out or sys.stdout; code = out.encoding or "utf-8"
    width = os.get_terminal_size(out.fileno()).columns if out.isatty() else 0
    fill = textwrap.TextWrapper(width or 1, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    for text in ("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line) for line in lines):
        text = text.encode(code, "backslashreplace").decode(code)
        print(fill.fill(text) if width else text, file=out)
def verify(path: Path, signers: Path | None, policy: Path | None) -> int:
    """Check all that lies there, print what was found, return the exit code. Raises Wrong, Unreadable."""
    (root, phases, promised), bundles = find(path), dict[str, Bundle]()
    if signers is not None: read(signers, MIB)  # one that cannot be read is no word about the run
    expected = Policy(parse_canonical(read(policy), policy)) if policy is not None else None
    lacks: dict[str, str] = {} if signers or policy else {"pinned": "say whose keys you expect: --allowed-signers"}
    for name, file in phases.items():
        bundles[name] = bundle = Bundle(file, signers, expected, name == promised or len(phases) == 1); bundle.check()
        leaves = check_transcripts(bundle, tree_of(file.parent)); check_derived(file.parent, bundle)
        if leaves < 0: lacks["transcripts"] = f"no transcripts of {name or file.name}: no leaf was recomputed"
        say(f"{name or '?'}: {bundle.length} epochs, {max(0, leaves)} leaves; policy {bundle.policy.hash.hex()}",
            f"  run root {bundle.data['run_root']}, result {', '.join(bundle.data['result_hashes'])}")
        who = {"three": THREE, "one": "one operator ran all three domains, and"}
        shown = "; the keys come from a public seed: a demonstration" if bundle.policy.seeded else ""
        words = {"off": NOTHING, "products": PRODUCTS, "proofs": PROOFS, "covert": COVERT.format(*bundle.audits())}
        form = [] if bundle.policy.form else ["  no model and batch are named: the form was not checked"]
        say(f"  {who[bundle.policy.who]} could look at everything{shown}", f"  {words[bundle.policy.verify]}", *form)
    terms = [({n: d["inputs"].get(n) for n in ("proposal", "attempt")}, d["reveal"], d["job"] | dict(steps=0, start=0))
             for d in (b.policy.data for b in bundles.values())]
    for what, of in zip(APART, zip(*terms, strict=True), strict=True):
        need(len(set(map(spelled, of))) == 1, Wrong, f"{', '.join(bundles)} {what}: no phases of one run")
    many = [f"P{i}" for i in range(3) if len({b.policy.keys[i][0] for b in bundles.values()}) > 1]
    if many: say(f"  {', '.join(many)} signed the phases with different keys: {OF_ONE_RUN}")
    lacks |= {"full": "no bundle of the full run is here"} if promised and promised not in phases else {}
    if root is not None and (why := check_manifest(root, signers, bundles, tree_of(root))): lacks["manifest"] = why
    say(*[f"NOT CHECKED  {name}: {why}" for name, why in lacks.items()] or ["VERIFIED"])
    return min((CODES[name] for name in lacks), default=0)
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, nargs="?", default=Path(__file__).resolve().parent)
    for n in ("--allowed-signers", "--policy"): parser.add_argument(n, type=lambda p: Path(p).resolve(), metavar="FILE")
    parser.error = lambda message: parser.exit(2, f"error: {message} (see: {parser.prog} --help)\n")  # type: ignore[method-assign]
    args = parser.parse_args(argv)
    try:
        try: return verify(args.path, args.allowed_signers, args.policy)
        except BAD:  # section 12: what is not as the collector signed it is wrong, however it reads
            if (root := find(args.path)[0]) is not None: check_manifest(root, None, {}, tree_of(root))
            raise
    except (Wrong, *BAD) as e:
        word, code = ("NOT VERIFIED", 1) if isinstance(e, Wrong) else ("UNREADABLE", 2)
        say(f"{word}  {e!s:.1000}", out=sys.stderr); return code
if __name__ == "__main__": sys.exit(main())
