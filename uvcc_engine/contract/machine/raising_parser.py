"""Wrong usage, told in the one form of all errors: what is wrong, and in the hint what was probably meant.

argparse prints its whole usage for a slip of the finger, in a form of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final, NoReturn

from uvcc_engine.contract.errors import ConfigError


def natural(text: str) -> int:
    """A whole number of at least 1, as an option takes it. Raises ValueError."""
    found = int(text)
    if found < 1:
        raise ValueError(text)
    return found


_NUMBERS: Final = ((int, "a whole number"), (float, "a number"), (natural, "a whole number of at least 1"))
_MOST: Final = 80  # characters of a word that are told


class RaisingParser(argparse.ArgumentParser):
    """argparse whose errors are ConfigErrors that name the nearest option, or the nearest of the words it takes."""

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError."""
        raise ConfigError(message.removeprefix("argument "), self.more())

    def more(self) -> str:
        """Where all is told that this takes."""
        return f"see: {self.prog} --help"

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's. Raises ConfigError for what is left over."""
        found, left = self.parse_known_args(args, namespace)
        if left:
            raise self._left_over(left, found)
        return found

    def _left_over(self, left: Sequence[str], found: argparse.Namespace) -> ConfigError:
        options = [word for word in left if word.startswith("-") and len(word) > 1]
        if not options:
            return ConfigError(f"{self.prog} does not take {_shown(' '.join(left))}", self.more())
        wrong = options[0].partition("=")[0]
        return ConfigError(f"unknown option {_shown(wrong)}", self._meant(wrong, list(self._options(found))))

    def _options(self, found: argparse.Namespace) -> Iterator[str]:
        """What this takes as options, and the action that was chosen of it."""
        for action in self._actions:
            yield from action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                chosen = action.choices.get(getattr(found, action.dest, ""))
                if isinstance(chosen, RaisingParser):
                    yield from chosen._options(found)

    def _meant(self, word: str, known: Collection[str]) -> str:
        from uvcc_engine.contract.parsing.suggest import CLOSE, nearest

        near = nearest(word, known, CLOSE)
        return f"did you mean {near}? {self.more()}" if near else self.more()

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        from uvcc_engine.contract.parsing.suggest import CLOSE, did_you_mean

        known = [str(choice) for choice in action.choices]
        hint = did_you_mean(str(value), known, f"one of: {', '.join(known)}", CLOSE)
        who = _named(action) if action.option_strings else self.prog
        raise ConfigError(f"{who} does not take {_shown(str(value))}", hint)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as e:
            kind = next((words for number, words in _NUMBERS if action.type is number), None)
            if kind is None:
                raise
            raise ConfigError(f"{_named(action)} takes {kind}, not {_shown(arg_string)}", self.more()) from e


def _named(action: argparse.Action) -> str:
    return "/".join(action.option_strings) or str(action.metavar or action.dest)


def _shown(word: str) -> str:
    return repr(word if len(word) <= _MOST else f"{word[:_MOST]}…")
