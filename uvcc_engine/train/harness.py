"""An exported model under EleutherAI's lm-evaluation-harness, whose tasks are then asked of it.

    python -m uvcc_engine.train.harness run --model uvcc --model_args folder=DIR --tasks lambada_openai

is that library's own command with one more kind of model; from Python, importing this module is enough for
``lm_eval.simple_evaluate(model="uvcc", model_args="folder=DIR", tasks=[...])``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.train.trained import exported
from uvcc_engine.train.trained.evaluate import scored
from uvcc_engine.train.trained.generate import Sampling, tokens_after

MOST_WRITTEN: Final = 256  # tokens of an answer, where the task does not say


@register_model("uvcc")
class UvccLM(LM):
    """A folder that ``uvcc-engine export`` made. Texts longer than ``length`` tokens lose their beginning."""

    def __init__(self, folder: str, batch_size: int | str = 8, length: int | str = 0, device: str = "cpu") -> None:
        """``length``: tokens of a row, as trained by default. ``device``: a CUDA device where there is none is the CPU,
        since the harness names one unasked. Raises as ``exported.load`` does, and ConfigError."""
        super().__init__()
        found = exported.load(Path(folder))
        here = "cpu" if device.startswith("cuda") and not torch.cuda.is_available() else device
        self.model, self.tokenizer = found.model.to(here), found.tokenizer
        self.length = int(length) or found.config.origin.seq_len
        self._batch = int(batch_size) if str(batch_size).isdecimal() else 8  # "auto" is for memory that varies
        if self.length < 2 or self._batch < 1:
            raise ConfigError(f"length={length}, batch_size={batch_size}", "length at least 2, batch_size at least 1")

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """For each (context, continuation): log p of the continuation, and whether each of its tokens is likeliest."""
        pairs = [self._cut(*request.args) for request in requests]
        found = self._answers(pairs)
        for request, answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, answer)
        return found

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """For each (text,): log p of all of it, in windows of ``length`` tokens that each predict new ones only."""
        found = []
        for request in requests:
            ids = self.tokenizer.encode(request.args[0])
            windows = get_rolling_token_windows(ids, self.tokenizer.eos, self.length, 1)
            answers = self._answers([make_disjoint_window(window) for window in windows])
            found.append(sum(value for value, _ in answers))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, found[-1])
        return found

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """For each (context, settings): what the model writes, up to the first of the texts in ``until``."""
        found = []
        for request in requests:
            context, settings = request.args
            found.append(self._written(context, settings))
            self.cache_hook.add_partial("generate_until", request.args, found[-1])
        return found

    def _cut(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Tokens of both; spaces at the context's end belong to what follows, as the harness's own models have it."""
        kept = context.rstrip()
        continuation = context[len(kept) :] + continuation if kept else continuation
        context = kept or context
        first = self.tokenizer.encode(context)
        whole = self.tokenizer.encode(context + continuation)
        return first or [self.tokenizer.eos], whole[len(first) :]

    def _answers(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """In the order of ``pairs``; rows of alike length are computed together, filled up behind their end."""
        found: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        rows = {n: [*first, *then][-self.length - 1 :] for n, (first, then) in enumerate(pairs) if then}
        order = sorted(rows, key=lambda n: len(rows[n]))
        for at in range(0, len(order), self._batch):
            those = order[at : at + self._batch]
            wide = max(len(rows[n]) for n in those)
            filled = torch.tensor([rows[n] + [self.tokenizer.eos] * (wide - len(rows[n])) for n in those])
            log_p, likeliest = scored(self.model, filled)
            for row, n in enumerate(those):
                end = len(rows[n]) - 1
                begin = max(0, end - len(pairs[n][1]))
                found[n] = float(log_p[row, begin:end].sum()), bool(likeliest[row, begin:end].all())
        return found

    def _written(self, context: str, settings: dict[str, Any]) -> str:
        until = settings.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        drawn = settings.get("do_sample", float(settings.get("temperature", 0.0)) > 0.0)
        how = Sampling(
            temperature=float(settings.get("temperature", 1.0)) if drawn else 0.0,
            top_k=int(settings.get("top_k", 0)),
            top_p=float(settings.get("top_p", 1.0)),
        )
        most = int(settings.get("max_gen_toks", MOST_WRITTEN))
        ids = (self.tokenizer.encode(context) or [self.tokenizer.eos])[-self.length :]
        text = ""
        for text in self._growing(ids, most, how):
            if any(stop in text for stop in stops):
                break
        return text[: min([text.find(stop) for stop in stops if stop in text], default=len(text))]

    def _growing(self, ids: list[int], most: int, how: Sampling) -> Iterator[str]:
        """The text after each token, to the document's end."""
        said: list[int] = []
        for token in tokens_after(self.model, torch.tensor([ids]), most, how):
            if int(token[0]) == self.tokenizer.eos:
                return
            said.append(int(token[0]))
            yield self.tokenizer.decode(said)


def main() -> int:
    """The harness's own command line, which knows ``--model uvcc`` by this module's import."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
