"""The settings of a profile as a list to be edited; what was changed stands out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from uvcc_console.ui.drawing.paint import clean, fit
from uvcc_console.ui.judging.view import View
from uvcc_console.ui.widgets.list_panel import ListPanel, ListRow

_OF_PARTIES: Final = (
    "topology",
    "link",
    "nats",
    "smoke.replicas",
    "fleet.per_party",
    "gates.result_hashes",
    "gates.verifier",
    "consent",
)
"""Settings that only a private run goes by; what was typed of them is shown all the same."""


def flat(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, value as it would be typed) of every setting that can be typed on a line."""
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield from flat(below, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        if all(not isinstance(v, Mapping | list) for v in value):
            yield path, "[" + ", ".join(typed(v) for v in value) + "]"
    else:
        yield path, typed(value)


def typed(value: object) -> str:
    """A single value as YAML takes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def _is_of_parties(key: str, profile: Mapping[str, Any]) -> bool:
    """Whether a setting means nothing here: it is about parties, and this job has none."""
    job = profile.get("job")
    private = not isinstance(job, Mapping) or job.get("kind") == "private"
    return not private and any(key == name or key.startswith(f"{name}.") for name in _OF_PARTIES)


class FieldsPanel(ListPanel):
    """Every setting that matters. Enter opens the line on which it is changed."""

    title = "Settings"
    help = (
        "Every setting that this kind of job goes by. Enter changes the one under the cursor, u takes the last change "
        "back."
    )

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.fields: dict[str, str] = {}
        self.changed: frozenset[str] = frozenset()
        self.wrong = ""

    def take(self, profile: Mapping[str, Any] | None, settings: Sequence[str], error: str) -> None:
        """The profile as it is now; None keeps the fields of before, for a change that is not possible."""
        typed_keys = frozenset(s.partition("=")[0].strip() for s in settings)
        if profile is not None:
            self.fields = {k: v for k, v in flat(profile) if k in typed_keys or not _is_of_parties(k, profile)}
        else:  # what was typed stands in its field, wrong as it is
            said = dict(s.partition("=")[::2] for s in settings)
            self.fields |= {key.strip(): text.strip() for key, text in said.items() if key.strip() in self.fields}
        self.changed = typed_keys
        self.wrong = error

    def rows(self, view: View, width: int) -> Sequence[ListRow]:
        wide = max((len(key) for key in self.fields), default=0)
        out: list[ListRow] = []
        for key, value in self.fields.items():
            bad = bool(self.wrong) and key in self.changed and key in self.wrong
            role = "bad" if bad else "accent bold" if key in self.changed else "text"
            out.append((key, [(fit(key, min(wide, max(8, width // 2))), "muted"), (" ", ""), (clean(value), role)]))
        return out

    def heading(self, view: View) -> tuple[str, str]:
        n = len(self.changed)
        return "Settings" + (f" {view.glyphs.dot} {n} changed" if n else ""), "Enter changes"
