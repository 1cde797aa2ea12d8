"""What a trained language model can do: ``uvcc-engine evaluate DIR``. Perplexity of a text, a needle, letters, copying.

``perplexity`` scores every token of a text from those before it in its row. ``needle`` hides a sentence in filler at
five depths and asks which of eight words it named (Kamradt 2023, as a choice, so that chance is one in eight). ``copy``
shows random tokens twice and asks for the second half (the induction test of Olsson et al. 2022). ``letters`` hides
three capitals in the first half of a passage and asks for them behind it, as ``data.source: hidden_letters`` trains it.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from uvcc_engine.contract.errors import ConfigError, UnreadableError
from uvcc_engine.contract.machine.raising_parser import RaisingParser
from uvcc_engine.nsa.model import LanguageModel
from uvcc_engine.train.config import VOCAB
from uvcc_engine.train.text.hidden_letters import ASKED, CHANCE, GROUPS, STRETCHES, Hideout
from uvcc_engine.train.text.sources import PythonManual
from uvcc_engine.train.text.tokenizer import Tokenizer
from uvcc_engine.train.trained import exported

BATCH: Final = 8  # rows at a time
DEPTHS: Final = (0.0, 0.25, 0.5, 0.75, 1.0)
WORDS: Final = ("amber", "birch", "coral", "delta", "ember", "flint", "grove", "haven")
_NAMES: Final = ("Ada", "Ben", "Cleo", "Dora", "Emil", "Fay", "Gus", "Hana")
_FILLER: Final = "The road goes on and there is nothing of note here.\n"
LEAST_ROW: Final = 64


@dataclass(frozen=True, slots=True)
class Score:
    """One figure. ``chance``: what guessing gives, nan where that means nothing; ``count``: tokens or questions."""

    task: str
    metric: str
    value: float
    chance: float
    count: int


def log_likelihoods(model: LanguageModel, rows: Tensor) -> Tensor:
    """rows int64 [B, S] -> log p of each token given those before it in its row, float32 [B, S - 1]."""
    return torch.cat([scored(model, part)[0] for part in torch.split(rows, BATCH)])


@torch.no_grad()
def scored(model: LanguageModel, rows: Tensor) -> tuple[Tensor, Tensor]:
    """rows int64 [B, S] at once -> log p of each token given those before it, and whether it is the likeliest one,
    both [B, S - 1]."""
    wanted = rows[:, 1:].to(model.embed.weight.device)
    logits = model(rows[:, :-1].to(wanted.device)).float()
    log_p = -F.cross_entropy(logits.transpose(1, 2), wanted, reduction="none")
    return log_p.cpu(), (logits.argmax(-1) == wanted).cpu()


def perplexity(model: LanguageModel, tokenizer: Tokenizer, texts: Sequence[str], length: int) -> Iterator[Score]:
    """Mean loss (nats a token), perplexity and bits a byte over rows of at most ``length`` tokens of ``texts``."""
    total, count, size = 0.0, 0, 0
    for text in texts:
        ids = [tokenizer.eos, *tokenizer.encode(text)]
        for start in range(0, len(ids) - 1, length):
            row = ids[start : start + length + 1]
            # the end of another document is forgotten, so a document's first token is not scored
            first = 1 if start == 0 else 0
            if len(row) < first + 2:
                continue
            scored = log_likelihoods(model, torch.tensor([row]))[0, first:]
            total, count = total - float(scored.sum()), count + len(scored)
            size += len(tokenizer.decode(row[1 + first :]).encode())
    if not count:
        raise ConfigError("the text has no token that could be scored", "a longer one")
    loss = total / count
    yield Score("perplexity", "loss", loss, math.nan, count)
    yield Score("perplexity", "perplexity", math.exp(min(loss, 50.0)), math.nan, count)
    yield Score("perplexity", "bits_per_byte", total / math.log(2) / max(1, size), math.nan, count)


def needle(model: LanguageModel, tokenizer: Tokenizer, length: int, trials: int, seed: int) -> Iterator[Score]:
    """Share of needles found at each depth of rows of ``length`` tokens, ``trials`` at each."""
    draw = random.Random(seed)
    hits = dict.fromkeys(DEPTHS, 0)
    for depth in DEPTHS:
        for _ in range(trials):
            name, word = draw.choice(_NAMES), draw.randrange(len(WORDS))
            rows, answer = needle_rows(tokenizer, length, depth, name, word)
            scores = log_likelihoods(model, rows)[:, -answer:].sum(-1)
            hits[depth] += int(int(scores.argmax()) == word)
    for depth, found in hits.items():
        yield Score("needle", f"found_at_{depth:.0%}", found / trials, 1 / len(WORDS), trials)
    yield Score("needle", "found", sum(hits.values()) / (trials * len(DEPTHS)), 1 / len(WORDS), trials * len(DEPTHS))


def needle_rows(tokenizer: Tokenizer, length: int, depth: float, name: str, word: int) -> tuple[Tensor, int]:
    """A row for each word as the answer, and how many tokens answers have at most. Shorter answers are led by filler.

    Raises ConfigError if ``length`` has no room for needle and question.
    """
    told, asked = f"The secret word of {name} is {WORDS[word]}.\n", f"The secret word of {name} is"
    needle_ids, question = tokenizer.encode(told), tokenizer.encode(asked)
    answers = [tokenizer.encode(f" {w}") for w in WORDS]
    most = max(map(len, answers))
    room = length - len(needle_ids) - len(question) - most
    filler = tokenizer.encode(_FILLER)
    if room < len(filler):
        raise ConfigError(f"rows of {length} tokens have no room for a needle", "--length of more")
    times = room // len(filler)
    before = round(depth * times)
    hay = [*filler * before, *needle_ids, *filler * (times - before)]
    rows = [[tokenizer.eos] * (most - len(a)) + hay + question + a for a in answers]
    return torch.tensor(rows), min(map(len, answers))


def copying(model: LanguageModel, tokenizer: Tokenizer, length: int, trials: int, seed: int) -> Iterator[Score]:
    """Share of the second half of a repeated random row that is foretold, its first token left out."""
    made = torch.Generator().manual_seed(seed)
    half = length // 2
    once = torch.randint(1, model.cfg.vocab, (trials, half), generator=made)
    once = once.masked_fill(once == tokenizer.eos, 1)
    rows = torch.cat([once, once], 1)
    hits = 0
    with torch.no_grad():
        for part in torch.split(rows, BATCH):
            foretold = model(part[:, :-1].to(model.embed.weight.device)).argmax(-1).cpu()
            hits += int((foretold[:, half:] == part[:, half + 1 :]).sum())
    count = trials * (half - 1)
    yield Score("copy", "foretold", hits / count, 1 / model.cfg.vocab, count)


def letters(
    model: LanguageModel, tokenizer: Tokenizer, texts: Sequence[str], length: int, trials: int, seed: int
) -> Iterator[Score]:
    """Share of hidden letters that are predicted, in ``trials`` passages of ``texts`` at each of five places.

    ``length`` counts the whole row. Raises ConfigError for a tokenizer that is not of bytes.
    """
    if model.cfg.vocab != VOCAB["byte"]:
        raise ConfigError("the task letters is for models of bytes", "leave --task letters out")
    draw, hideout = random.Random(seed), Hideout(tuple(texts))
    made = [hideout.passage(draw, draw.randrange(STRETCHES), length - ASKED - 1, 0.5) for _ in range(trials * 5)]
    hits = 0
    for at in range(0, len(made), BATCH):
        part = made[at : at + BATCH]
        rows = torch.tensor([[tokenizer.eos, *document] for document, _ in part])
        foretold = scored(model, rows)[1]
        hits += sum(int(row[answers].sum()) for row, (_, answers) in zip(foretold, part, strict=True))
    yield Score("letters", "found", hits / (len(made) * len(GROUPS)), CHANCE, len(made) * len(GROUPS))


TASKS: Final = ("perplexity", "needle", "copy")
ASKED_FOR: Final = ("letters",)
"""Tasks that only make sense for a model that was trained on their kind of text."""


def evaluate(
    model: exported.Exported, tasks: Sequence[str], texts: Sequence[str], *, length: int, trials: int, seed: int
) -> list[Score]:
    """The scores of ``tasks``. Raises ConfigError for a text without tokens or rows that are too short."""
    if length < LEAST_ROW:
        raise ConfigError(f"--length {length}", f"at least {LEAST_ROW} tokens")
    net, tokenizer = model.model, model.tokenizer
    do: dict[str, Callable[[], Iterator[Score]]] = {
        "perplexity": lambda: perplexity(net, tokenizer, texts, length),
        "needle": lambda: needle(net, tokenizer, length, trials, seed),
        "copy": lambda: copying(net, tokenizer, length, trials, seed),
        "letters": lambda: letters(net, tokenizer, texts, length, trials, seed),
    }
    return [score for task in tasks for score in do[task]()]


def _texts(paths: Sequence[Path]) -> list[str]:
    """The files' texts; without files, the manual that each Python carries."""
    if not paths:
        return list(PythonManual().one_pass())
    try:
        return [path.read_text("utf-8") for path in paths]
    except OSError as error:
        raise UnreadableError(f"cannot read {error.filename}: {error.strerror}", "--text FILE") from error
    except UnicodeDecodeError as error:
        raise UnreadableError(f"a file of --text is no UTF-8 text: {error}", "--text FILE") from error


def main(argv: list[str]) -> int:
    """``uvcc-engine evaluate DIR``: a line for each figure, or one JSON array."""
    parser = RaisingParser(prog="uvcc-engine evaluate", description="what a trained language model can do")
    parser.add_argument("folder", type=Path, help="what uvcc-engine export made")
    parser.add_argument(
        "--task",
        action="append",
        choices=(*TASKS, *ASKED_FOR),
        default=[],
        help="one of them (default: all but letters)",
    )
    parser.add_argument(
        "--text", action="append", type=Path, default=[], metavar="FILE", help="for perplexity, letters"
    )
    parser.add_argument("--length", type=int, default=0, metavar="N", help="tokens of a row (default: as trained)")
    parser.add_argument(
        "--trials", type=int, default=20, metavar="N", help="rows to copy, needles and passages a depth (20)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the same questions for the same seed (0)")
    parser.add_argument("--json", action="store_true", help="print one JSON array")
    args = parser.parse_args(argv)
    if args.trials < 1:
        raise ConfigError(f"--trials {args.trials}", "at least 1")
    model = exported.load(args.folder)
    tasks = args.task or TASKS
    texts = _texts(args.text) if {"perplexity", "letters"} & set(tasks) else []
    length = args.length or model.config.origin.seq_len
    scores = evaluate(model, tasks, texts, length=length, trials=args.trials, seed=args.seed)
    if args.json:
        print(json.dumps([{k: None if v != v else v for k, v in asdict(s).items()} for s in scores]))
        return 0
    for s in scores:
        against = "" if math.isnan(s.chance) else f"  chance {s.chance:.4g}"
        print(f"{s.task:<11} {s.metric:<14} {s.value:10.4f}{against}  ({s.count:,})")
    return 0
