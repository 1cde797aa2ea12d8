"""Text from a trained model: ``uvcc-engine generate DIR --prompt TEXT``; ``uvcc-engine export RUN --out DIR``.

One token at a time from caches (see ``nsa.decode``), drawn by temperature, top-k and nucleus (Holtzman et al. 2019).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.text import clean_block
from uvcc_engine.nsa import decode
from uvcc_engine.nsa.model import LanguageModel
from uvcc_engine.train import exported
from uvcc_engine.train.text.tokenizer import Tokenizer


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
        if self.top_k < 0:
            raise ConfigError(f"top-k {self.top_k}", "it must be 0 (all) or more")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top-p {self.top_p}", "it must be above 0 and at most 1")


def drawn(logits: Tensor, how: Sampling, random: torch.Generator) -> Tensor:
    """One token per row. logits [B, vocab] -> int64 [B] beside them; drawn on the CPU, alike on every device."""
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
    return torch.multinomial(p, 1, generator=random)[:, 0].to(logits.device)


@torch.no_grad()
def tokens_after(model: LanguageModel, prompt: Tensor, most: int, how: Sampling) -> Iterator[Tensor]:
    """Up to ``most`` tokens after prompts of equal length. prompt int64 [B, S], S >= 1 -> int64 [B] each.

    A dense model has no caches here and reads the whole row again for every token.
    """
    random = torch.Generator().manual_seed(how.seed)
    prompt = prompt.to(model.embed.weight.device)
    if model.cfg.attention == "dense":
        row = prompt
        for _ in range(most):
            token = drawn(model(row)[:, -1], how, random)
            yield token
            row = torch.cat([row, token[:, None]], 1)
        return
    logits, state = decode.prefill(model, prompt)
    for left in range(most, 0, -1):
        token = drawn(logits, how, random)
        yield token
        if left > 1:
            logits = decode.step(model, state, token)


@dataclass(frozen=True, slots=True)
class Continuation:
    """One continuation, without its prompt. ``ended``: the model ended the document; ``tokens`` it drew."""

    text: str
    tokens: int
    ended: bool


def continue_text(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: str,
    most: int,
    how: Sampling,
    *,
    on_text: Callable[[str], object] = lambda piece: None,
) -> Continuation:
    """Go on from ``prompt`` for up to ``most`` tokens or to the document's end. ``on_text`` hears pieces as they come.

    Without a prompt the first token is what follows the end of some other document, which is then forgotten.
    """
    pieces: list[str] = []
    pending: list[int] = []  # ids whose text was not handed on yet
    count, ended = 0, False

    def hand_on() -> None:
        if pending:
            pieces.append(tokenizer.decode(pending))
            on_text(pieces[-1])
            pending.clear()

    for token in _ids_after(model, tokenizer, prompt, most, how):
        count += 1
        if ended := token == tokenizer.eos:
            break
        pending.append(token)
        if not tokenizer.decode(pending).endswith("\ufffd"):  # else a character's last bytes are still to come
            hand_on()
    hand_on()
    return Continuation("".join(pieces), count, ended)


def _ids_after(model: LanguageModel, tokenizer: Tokenizer, prompt: str, most: int, how: Sampling) -> Iterator[int]:
    ids = tokenizer.encode(prompt)
    if not ids:
        ids = next(tokens_after(model, torch.tensor([[tokenizer.eos]]), 1, how)).tolist()
        most -= 1
        yield from ids
    yield from (int(token[0]) for token in tokens_after(model, torch.tensor([ids]), most, how))


def _prompt_of(args: argparse.Namespace) -> str:
    if args.prompt_file is None:
        return str(args.prompt)
    try:
        return sys.stdin.read() if args.prompt_file == "-" else Path(args.prompt_file).read_text("utf-8")
    except OSError as error:
        raise UnreadableError(f"cannot read {args.prompt_file}: {error.strerror}", "--prompt TEXT") from error
    except UnicodeDecodeError as error:
        raise UnreadableError(f"{args.prompt_file} is not UTF-8 text", "--prompt TEXT") from error


def main(argv: list[str]) -> int:
    """``uvcc-engine generate DIR --prompt TEXT``: the prompt and what the model makes of it, as it comes."""
    parser = argparse.ArgumentParser(prog="uvcc-engine generate", description="continue a text with a trained model")
    parser.add_argument("folder", type=Path, help="what uvcc-engine export made")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--prompt", default="", metavar="TEXT", help="what to go on from (default: a new document)")
    which.add_argument("--prompt-file", metavar="FILE", help="the same from a file; - is standard input")
    parser.add_argument("--tokens", type=int, default=200, metavar="N", help="at most so many (200)")
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="so many continuations (1)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="X", help="0 takes the likeliest (0.8)")
    parser.add_argument("--top-k", type=int, default=0, metavar="N", help="draw from the N likeliest (0 = all)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="X", help="draw from the likeliest X of 1 (1)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the same text for the same seed (0)")
    parser.add_argument("--json", action="store_true", help="print JSON, one line a sample")
    args = parser.parse_args(argv)
    if args.tokens < 1 or args.samples < 1:
        raise ConfigError(f"--tokens {args.tokens}, --samples {args.samples}", "both must be at least 1")
    model = exported.load(args.folder)
    prompt = _prompt_of(args)
    for number in range(args.samples):
        how = Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed + number)
        if args.json:
            began = time.perf_counter()
            made = continue_text(model.model, model.tokenizer, prompt, args.tokens, how)
            rate = made.tokens / (time.perf_counter() - began)
            told = {"prompt": prompt, "text": made.text, "tokens": made.tokens, "ended": made.ended}
            print(json.dumps({**told, "seed": how.seed, "tokens_per_s": round(rate, 1)}))
            continue
        print(clean_block(prompt), end="", flush=True)
        continue_text(
            model.model,
            model.tokenizer,
            prompt,
            args.tokens,
            how,
            on_text=lambda piece: print(clean_block(piece), end="", flush=True),
        )
        print()
    return 0


def export_main(argv: list[str]) -> int:
    """``uvcc-engine export RUN --out DIR``: the weights of a run's checkpoint as a folder of their own."""
    parser = argparse.ArgumentParser(prog="uvcc-engine export", description="a trained model as a folder of its own")
    parser.add_argument("run", type=Path, help="directory of a language model's training")
    parser.add_argument("--out", type=Path, required=True, help="the new folder")
    parser.add_argument("--step", type=int, default=-1, metavar="N", help="of this checkpoint (default: the newest)")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"], help="of the weights (fp32)")
    args = parser.parse_args(argv)
    said = exported.export(args.run, args.out, step=args.step, precision=args.precision)
    print(f"{args.out}: step {said.origin.step} of {said.origin.run}, weights {said.sha256}")
    return 0
