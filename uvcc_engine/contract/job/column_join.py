"""Rows of which several owners hold different columns, put together by a key that all of them have.

``key`` names that column in every owner's table. What an owner gives is features, labels, or both; the model sees the
features of owner 0 first, then those of owner 1, and so on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.parsing import strict

KeyForm = Literal["text", "exact", "number"]
KEY_FORMS: Final[tuple[str, ...]] = get_args(KeyForm)
MOST_OWNERS: Final = 16
_FIELDS: Final = ("key", "columns", "label", "form")
_NAME: Final = re.compile(r"[^\x00-\x1f\x7f]{1,80}")


@dataclass(frozen=True, slots=True)
class ColumnJoin:
    """``columns``: how many features each owner gives, in the owners' order; ``label``: the number of the one owner
    whose labels are learnt. ``form``: how keys are compared. ``text``: without case, in Unicode's compatible form, with
    each run of blanks as one; ``exact``: as they stand; ``number``: whole numbers, so that 007 is 7."""

    key: str
    columns: tuple[int, ...]
    label: int
    form: KeyForm = "text"

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.key) or self.key != self.key.strip():
            raise ConfigError(f"job.join.key is {self.key[:80]!r}", "the name of the column that all owners have")
        if not 2 <= len(self.columns) <= MOST_OWNERS:
            what = f"job.join.columns names {len(self.columns)} owners"
            raise ConfigError(what, f"a number of features for each, 2 to {MOST_OWNERS} owners")
        if self.label not in range(len(self.columns)):
            raise ConfigError(
                f"job.join.label is {self.label}", f"the owner of the labels: 0 to {len(self.columns) - 1}"
            )
        for number, columns in enumerate(self.columns):
            if columns < (0 if number == self.label else 1):
                raise ConfigError(
                    f"job.join.columns: owner {number} gives {columns} features", "only the owner of the labels gives 0"
                )
        if self.form not in KEY_FORMS:
            raise ConfigError(f"job.join.form is {self.form!r}", f"one of {', '.join(KEY_FORMS)}")

    @classmethod
    def of_job(cls, job: Mapping[str, Any]) -> ColumnJoin | None:
        """What a job says of it; None where its owners hold rows. Raises ConfigError naming the offending field."""
        found = job.get("join")
        return None if found is None else strict.read(cls, found, "job.join")

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {name: getattr(self, name) for name in _FIELDS}
        return found | {"columns": list(self.columns)}

    def check_owners(self, owners: int) -> None:
        """Refuse (ConfigError) another number of owners than it is for."""
        if owners != len(self.columns):
            what = f"job.join.columns is of {len(self.columns)} owners, and there are {owners}"
            raise ConfigError(what, "one number for each owner, in the proposal's order")

    def leaks(self, number: int) -> list[str]:
        """What putting the rows together tells to whom, in sentences for the owner ``number``."""
        others = "the other owner" if len(self.columns) == 2 else "each other owner"
        more = [] if len(self.columns) == 2 else ["of two other owners, how many keys they share with each other;"]
        return [
            f"{others} learns which of its own keys you have, and you which of yours it has;",
            *more,
            f"{others} learns your number of rows up to the next power of two, and so does the relay;",
            f"{others} can test guesses of your keys: where all keys can be listed, it can find all of yours;",
            "domains, coordinator and relay learn no key and nothing to test guesses with;",
            "the domains, and whoever reads the evidence, learn how many rows all owners have in common.",
        ]
