"""``uvcc-engine data``: does the source deliver, how fast, what does it look like; and preparing it once for good."""

from __future__ import annotations

import json
import os
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.machine.raising_parser import RaisingParser
from uvcc_engine.train import env as lm_env
from uvcc_engine.train.config import LMConfig
from uvcc_engine.train.lm_job import check_world, overrides, resolve
from uvcc_engine.train.text.data import Packer
from uvcc_engine.train.text.documents import unasked
from uvcc_engine.train.text.prepare import one_pass, prepare
from uvcc_engine.train.text.sources import make_source
from uvcc_engine.train.text.tokenizer import tokenizer_of, train_tokenizer


@dataclass(frozen=True, slots=True)
class SourceProbe:
    """What came: seconds per batch, its shape, documents read, how many documents end in the rows, the first text."""

    seconds: list[float]
    rows: int
    width: int
    documents: int
    ends: int
    sample: str

    def to_json(self) -> dict[str, Any]:
        return {
            "batches": len(self.seconds),
            "rows": self.rows,
            "tokens_per_row": self.width,
            "first_s": self.seconds[0],
            "median_s": statistics.median(self.seconds[1:] or self.seconds),
            "documents": self.documents,
            "documents_ended": self.ends,
            "sample": self.sample,
        }


def probe(cfg: LMConfig, *, rank: int, world: int, batches: int) -> SourceProbe:
    """Read batches as rank ``rank`` would. Raises what a training would: UnreachableError, ConfigError."""
    check_world(cfg, world)
    tokenizer = tokenizer_of(cfg.data, cfg.model.vocab)
    packer = Packer(
        make_source(cfg.data, cfg.train.seed),
        tokenizer,
        seq_len=cfg.train.seq_len,
        rank=rank,
        world=world,
        val=False,
        val_percent=cfg.data.val_percent,
        retries=cfg.data.retries,
    )
    found = [packer.batch(cfg.train.batch_size // world) for _ in range(batches)]
    rows, width = found[0].tokens.shape
    first = [unasked(t) if t < 0 else t for t in found[0].tokens[0].tolist()]
    return SourceProbe(
        [b.fetch_s for b in found],
        rows,
        width,
        packer.documents,
        sum(int((b.tokens == tokenizer.eos).sum()) for b in found),
        tokenizer.decode([t for t in first if t != tokenizer.eos])[:160],
    )


def main(argv: list[str]) -> int:
    """``uvcc-engine data probe CONFIG``, ``data prepare CONFIG --out FOLDER``, ``data tokenizer CONFIG --out FILE``."""
    parser = RaisingParser(prog="uvcc-engine data", description="look at a training's data source, prepare it")
    parser.add_argument("action", choices=["probe", "prepare", "tokenizer"])
    parser.add_argument("config", help="a packaged config or a YAML file")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a key")
    parser.add_argument("--batches", type=int, default=5, help="probe: read so many")
    parser.add_argument("--ranks", type=int, default=1, help="probe: as one of so many ranks")
    parser.add_argument("--rank", type=int, default=0, help="probe: which of them")
    parser.add_argument("--out", type=Path, help="prepare, tokenizer: what to write; it must not exist")
    parser.add_argument("--documents", type=int, default=0, help="prepare, tokenizer: at most so many; 0: one pass")
    parser.add_argument(
        "--vocab", type=int, default=4096, help="tokenizer: symbols, the 256 bytes and the end included"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    cfg, _ = lm_env.apply(resolve({"config": args.config, "overrides": overrides(args.set)}), os.environ)
    if args.action == "prepare":
        return _prepare(cfg, args.out, args.documents, args.json)
    if args.action == "tokenizer":
        return _tokenizer(cfg, args.out, args.documents, args.vocab)
    found = probe(cfg, rank=args.rank, world=args.ranks, batches=max(1, args.batches)).to_json()
    if args.json:
        json.dump(found, sys.stdout)
        print()
        return 0
    shape = f"{found['rows']} x {found['tokens_per_row']} tokens"
    print(f"{cfg.data.source}: {found['batches']} batches of {shape} ({cfg.data.tokenizer})")
    print(f"first batch {found['first_s']:.3f} s, then {found['median_s']:.4f} s each (median)")
    print(f"read {found['documents']} documents, {found['documents_ended']} end inside the rows")
    print(f"begins: {found['sample']!r}")
    return 0


def _prepare(cfg: LMConfig, out: Path | None, most: int, as_json: bool) -> int:
    if out is None or most < 0:
        raise ConfigError("data prepare needs a folder and no negative number", "--out FOLDER, --documents 0 or more")

    def progress(documents: int, tokens: int) -> None:
        print(f"{documents:,} documents, {tokens:,} tokens", file=sys.stderr)

    made = prepare(cfg.data, cfg.train.seed, out, documents=most, progress=progress)
    found = {"folder": str(out), "documents": made.documents, "tokens": made.tokens, "shards": len(made.shards)}
    if as_json:
        print(json.dumps(found | {"tokenizer": made.tokenizer, "digest": made.digest()}))
        return 0
    shards = f"{len(made.shards)} shard{'s' if len(made.shards) > 1 else ''}"
    print(f"{out}: {made.documents:,} documents, {made.tokens:,} tokens ({made.tokenizer}), {shards}")
    print(f"train on it: --set data.source=prepared --set data.path={out}")
    return 0


def _tokenizer(cfg: LMConfig, out: Path | None, most: int, vocab: int) -> int:
    if out is None or most < 0:
        raise ConfigError("data tokenizer needs a file and no negative number", "--out tokenizer.json")
    size = train_tokenizer(one_pass(make_source(cfg.data, cfg.train.seed), most), vocab, out)
    print(f"{out}: {size:,} symbols")
    print(f"train with it: --set data.tokenizer=file --set data.tokenizer_file={out} --set model.vocab={size}")
    return 0
