"""Settings of a language model's run that a resume changes; whatever gave the checkpoint its shape stays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.parsing import yaml_text

SECTIONS: Final = ("train", "data", "runtime", "ddp")
FIXED: Final[Mapping[str, str]] = {
    "model": "the checkpoint has the shape of this model",
    "nsa": "the checkpoint was trained with this attention",
    "train.steps": "the profile's steps are what was planned and priced; a new run has others",
    "train.seed": "the data goes on from where the checkpoint stood",
}
Scalar = str | int | float | bool
_FORM: Final = "write it like --set train.lr=0.0001"


def parse(pairs: Sequence[str]) -> dict[str, Scalar | None]:
    """``section.key=value`` texts by key; a value is YAML, an empty one (None) takes an earlier change back.

    Raises ConfigError naming what cannot be changed.
    """
    import yaml

    found: dict[str, object] = {}
    for pair in pairs:
        path, sign, text = pair.partition("=")
        if not sign:
            raise ConfigError(f"--set {pair}", _FORM)
        try:
            found[path] = yaml_text.load(text) if text else None
        except yaml.YAMLError:
            found[path] = text
    return well_formed(found)


def well_formed(found: object) -> dict[str, Scalar | None]:
    """Changes by key, if each may be made, from a command line or a journal. Raises ConfigError naming one that not."""
    if not isinstance(found, Mapping):
        raise ConfigError("changed settings are not a mapping")
    made: dict[str, Scalar | None] = {}
    for name, value in found.items():
        path = str(name)
        section, _, key = path.partition(".")
        if why := FIXED.get(section) or FIXED.get(path):
            raise ConfigError(f"{path} cannot be changed in a run: {why}", "uvcc rollout starts a new one")
        if section not in SECTIONS:
            raise ConfigError(f"there is no section {section!r} to change", f"one of {', '.join(SECTIONS)}")
        if not key.isidentifier():
            raise ConfigError(f"{path} names no setting", _FORM)
        if not (value is None or isinstance(value, (str, int, float, bool))):
            raise ConfigError(f"{path}: not one value", _FORM)
        made[path] = value
    return made


def laid_upon(job: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """A language model's job section with the changes in force."""
    made = dict(job)
    for path, value in changed.items():
        section, _, key = path.partition(".")
        made[section] = {**made.get(section, {}), key: value}
    return made
