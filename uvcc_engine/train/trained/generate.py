"""Text from a trained model: ``uvcc-engine generate DIR --prompt TEXT``; ``uvcc-engine export RUN --out DIR``.

One token at a time from caches (see ``nsa.decode``), drawn by temperature, top-k and nucleus (Holtzman et al. 2019).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.machine.help_text import HelpFormatter
from uvcc_engine.contract.machine.raising_parser import RaisingParser
from uvcc_engine.contract.parsing.untrusted import load_json
from uvcc_engine.contract.text import clean_block
from uvcc_engine.nsa import decode
from uvcc_engine.nsa.fixed_decode import FixedDecoder
from uvcc_engine.nsa.model import LanguageModel
from uvcc_engine.train.config import LARGEST
from uvcc_engine.train.distributed import choose_device
from uvcc_engine.train.text.tokenizer import Tokenizer
from uvcc_engine.train.trained import arcee, exported


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is drawn. ``temperature`` 0 takes the likeliest; ``top_k`` 0 and ``top_p`` 1 leave all in."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 100.0:
            raise ConfigError(f"temperature {self.temperature}", "it must be 0 to 100")
        if abs(self.seed) > LARGEST:
            raise ConfigError(f"seed {self.seed}", f"it must be -{LARGEST} to {LARGEST}")
        if self.top_k < 0:
            raise ConfigError(f"top-k {self.top_k}", "it must be 0 (all) or more")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top-p {self.top_p}", "it must be above 0 and at most 1")


def drawn(logits: Tensor, how: Sampling, random: Sequence[torch.Generator]) -> Tensor:
    """One token per row. logits [B, vocab] -> int64 [B] beside them; drawn on the CPU, alike on every device, each row
    by the generator of its own, so that what a row says does not depend on who is beside it."""
    if how.temperature == 0.0:
        return logits.argmax(-1)
    scores = logits.float().cpu() / how.temperature
    if how.top_k:
        least = scores.topk(min(how.top_k, scores.shape[-1])).values[:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    p = torch.softmax(scores, -1)
    if how.top_p < 1.0:
        ranked, order = p.sort(-1, descending=True)
        beyond = ranked.cumsum(-1) - ranked >= how.top_p  # the first is never beyond
        p = p.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), 0.0)
    tokens = [torch.multinomial(row, 1, generator=own) for row, own in zip(p, random, strict=True)]
    return torch.cat(tokens).to(logits.device)


@torch.no_grad()
def tokens_after(
    model: LanguageModel, prompt: Tensor, most: int, how: Sampling, seeds: Sequence[int] = (), *, graph: bool = False
) -> Iterator[Tensor]:
    """Up to ``most`` tokens after prompts of equal length. prompt int64 [B, S], S >= 1 -> int64 [B] each.

    ``seeds``: of each row; ``how.seed`` and those after it by default. ``graph``: see :func:`continue_text`.
    """
    seeds = seeds or range(how.seed, how.seed + len(prompt))
    random = [torch.Generator().manual_seed(seed) for seed in seeds]
    prompt = prompt.to(model.embed.weight.device)
    logits, state = decode.prefill(model, prompt)
    fixed = FixedDecoder(model, state, most, graph=True) if graph and most > 1 else None
    for left in range(most, 0, -1):
        token = drawn(logits, how, random)
        yield token
        if left > 1:
            logits = decode.step(model, state, token) if fixed is None else fixed.step(token)


@dataclass(frozen=True, slots=True)
class Continuation:
    """One continuation, without its prompt. ``ended``: the model ended the document; ``tokens`` it drew."""

    text: str
    tokens: int
    ended: bool


class _Row:
    """A continuation while it grows. ``on_text`` hears each piece once its characters are whole."""

    def __init__(self, tokenizer: Tokenizer, on_text: Callable[[str], object] = lambda piece: None) -> None:
        self._tokenizer, self._on_text = tokenizer, on_text
        self._pieces: list[str] = []
        self._pending: list[int] = []  # ids whose text was not handed on yet
        self._count, self.ended = 0, False

    def add(self, token: int) -> None:
        """One more token; none counts once the document has ended."""
        if self.ended:
            return
        self._count += 1
        self.ended = token == self._tokenizer.eos
        if not self.ended:
            self._pending.append(token)
            if not self._tokenizer.decode(self._pending).endswith(
                "\ufffd"
            ):  # else a character's last bytes are to come
                self._hand_on()

    def _hand_on(self) -> None:
        if self._pending:
            self._pieces.append(self._tokenizer.decode(self._pending))
            self._on_text(self._pieces[-1])
            self._pending.clear()

    def whole(self) -> Continuation:
        """What was said, with the bytes that became no character."""
        self._hand_on()
        return Continuation("".join(self._pieces), self._count, self.ended)


def continue_text(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: str,
    most: int,
    how: Sampling,
    *,
    on_text: Callable[[str], object] = lambda piece: None,
    graph: bool = False,
) -> Continuation:
    """Go on from ``prompt`` for up to ``most`` tokens or to the document's end. ``on_text`` hears pieces as they come.

    Without a prompt the first token is what follows the end of some other document, which is then forgotten.
    ``graph``: a step is recorded as a CUDA graph and replayed, with one launch for the whole model. Raises ConfigError
    for it on a device that is no NVIDIA GPU, and for a model without NSA.
    """
    row = _Row(tokenizer, on_text)
    _go_on(model, tokenizer, [tokenizer.encode(prompt)], most, how, [how.seed], [row], graph=graph)
    return row.whole()


def continue_texts(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[tuple[str, int]],
    most: int,
    how: Sampling,
    batch: int,
    *,
    graph: bool = False,
) -> list[Continuation]:
    """``continue_text`` of several prompts, each with a seed of its own instead of ``how.seed``, in their order.

    Those of equally many tokens are computed together, up to ``batch`` at a time.
    """
    rows = [_Row(tokenizer) for _ in prompts]
    ids = [tokenizer.encode(text) for text, _ in prompts]
    by_length: dict[int, list[int]] = {}
    for number, known in enumerate(ids):
        by_length.setdefault(len(known), []).append(number)
    for alike in by_length.values():
        for at in range(0, len(alike), batch):
            those = alike[at : at + batch]
            seeds = [prompts[n][1] for n in those]
            mine = [rows[n] for n in those]
            _go_on(model, tokenizer, [ids[n] for n in those], most, how, seeds, mine, graph=graph)
    return [row.whole() for row in rows]


def _go_on(
    model: LanguageModel,
    tokenizer: Tokenizer,
    ids: list[list[int]],
    most: int,
    how: Sampling,
    seeds: Sequence[int],
    rows: Sequence[_Row],
    *,
    graph: bool,
) -> None:
    """Let ``rows`` grow behind prompts ``ids`` of equal length, until all have ended or have ``most`` tokens."""

    def add(tokens: Tensor) -> None:
        for row, token in zip(rows, tokens.tolist(), strict=True):
            row.add(token)

    if not ids[0]:
        begin = torch.full((len(ids), 1), tokenizer.eos)
        first = next(tokens_after(model, begin, 1, how, seeds))
        add(first)
        ids, most = first[:, None].tolist(), most - 1
    for tokens in tokens_after(model, torch.tensor(ids), most, how, seeds, graph=graph):
        if all(row.ended for row in rows):
            return
        add(tokens)


def _prompts_of(args: argparse.Namespace) -> list[str]:
    name = args.prompt_file if args.prompts is None else args.prompts
    if name is None:
        return [str(args.prompt)]
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text("utf-8")
    except OSError as error:
        raise UnreadableError(f"cannot read {name}: {error.strerror}", "--prompt TEXT") from error
    except UnicodeDecodeError as error:
        raise UnreadableError(f"{name} is not UTF-8 text", "--prompt TEXT") from error
    if args.prompts is None:
        return [text]
    return [_prompt_in(line, f"{name} line {n}") for n, line in enumerate(text.splitlines(), 1) if line.strip()]


def _prompt_in(line: str, where: str) -> str:
    try:
        found = load_json(line)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("prompt"), str):
        raise UnreadableError(f"{where} holds no prompt", 'each line is like {"prompt": "TEXT"}')
    return str(found["prompt"])


def main(argv: list[str]) -> int:
    """``uvcc-engine generate DIR --prompt TEXT``: the prompt and what the model makes of it as it comes, or many."""
    parser = RaisingParser(
        prog="uvcc-engine generate", description="continue a text with a trained model", formatter_class=HelpFormatter
    )
    parser.add_argument("folder", type=Path, help="what uvcc-engine export made")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--prompt", default="", metavar="TEXT", help="what to go on from (default: a new document)")
    which.add_argument("--prompt-file", metavar="FILE", help="the same from a file; - is standard input")
    which.add_argument("--prompts", metavar="FILE", help='many: a line of JSON like {"prompt": "TEXT"} each')
    parser.add_argument("--tokens", type=int, default=200, metavar="N", help="at most so many (200)")
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="so many continuations (1)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="X", help="0 takes the likeliest (0.8)")
    parser.add_argument("--top-k", type=int, default=0, metavar="N", help="draw from the N likeliest (0 = all)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="X", help="draw from the likeliest X of 1 (1)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the same text for the same seed (0)")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="so many of equal length at a time (8)")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"], help="auto takes a GPU (auto)")
    parser.add_argument(
        "--graph",
        action=argparse.BooleanOptionalAction,
        help="replay each step as a CUDA graph (by default with NSA on an NVIDIA GPU)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, one line a sample")
    args = parser.parse_args(argv)
    if min(args.tokens, args.samples, args.batch) < 1:
        what = f"--tokens {args.tokens}, --samples {args.samples}, --batch {args.batch}"
        raise ConfigError(what, "each must be at least 1")
    device = choose_device(args.device, 0, "--device")
    model = exported.load(args.folder)
    model.model.to(device)
    if args.graph is None:
        args.graph = device.type == "cuda" and model.model.cfg.attention == "nsa"
    prompts = [(text, args.seed + n) for text in _prompts_of(args) for n in range(args.samples)]
    how = Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed)
    if len(prompts) == 1 and not args.json:  # as it comes
        print(clean_block(prompts[0][0]), end="", flush=True)
        continue_text(
            model.model,
            model.tokenizer,
            prompts[0][0],
            args.tokens,
            how,
            on_text=lambda piece: print(clean_block(piece), end="", flush=True),
            graph=args.graph,
        )
        print()
        return 0
    began = time.perf_counter()
    made = continue_texts(model.model, model.tokenizer, prompts, args.tokens, how, args.batch, graph=args.graph)
    rate = round(sum(m.tokens for m in made) / (time.perf_counter() - began), 1)
    for (prompt, seed), one in zip(prompts, made, strict=True):
        if args.json:
            told = {"prompt": prompt, "text": one.text, "tokens": one.tokens, "ended": one.ended}
            print(json.dumps({**told, "seed": seed, "tokens_per_s": rate}))
        else:
            print(clean_block(prompt + one.text))
    return 0


def export_main(argv: list[str]) -> int:
    """``uvcc-engine export RUN --out DIR``: the weights of a run's checkpoint as a folder of their own."""
    parser = RaisingParser(prog="uvcc-engine export", description="a trained model as a folder of its own")
    parser.add_argument("run", type=Path, help="directory of a language model's training")
    parser.add_argument("--out", type=Path, required=True, help="the new folder")
    parser.add_argument("--step", type=int, default=-1, metavar="N", help="of this checkpoint (default: the newest)")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"], help="of the weights (fp32)")
    parser.add_argument(
        "--format", default="uvcc", choices=["uvcc", "transformers"], help="transformers: for Hugging Face (uvcc)"
    )
    args = parser.parse_args(argv)
    if args.format == "transformers":
        said = arcee.export(args.run, args.out, step=args.step, precision=args.precision)
    else:
        said = exported.export(args.run, args.out, step=args.step, precision=args.precision)
    print(f"{args.out}: step {said.origin.step} of {said.origin.run}, weights {said.sha256}")
    return 0
