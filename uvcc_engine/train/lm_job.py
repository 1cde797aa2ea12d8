"""From a job section to the config of the run: packaged or own settings, overrides, the environment, the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.parsing import yaml_text
from uvcc_engine.train import config as lm_config
from uvcc_engine.train.config import LMConfig

AUTO: Final = "auto"
_OWN: Final = ("kind", "config", "plan", "overrides", "steps", "seed", "ranks")


def resolve(job: Mapping[str, Any], *, vram_mib: int = 0) -> LMConfig:
    """The config that a job section means.

    ``config`` is a packaged config, a YAML file, a mapping, or ``auto``: the M7C config for a GPU of ``vram_mib``.
    Then ``overrides`` (sections of keys), then ``steps`` and ``seed``. Sections may also stand beside ``config``.
    Raises ConfigError naming the key that is wrong.
    """
    name = job.get("config") or {}
    if name == AUTO:
        if not vram_mib:
            raise ConfigError("config: auto picks by GPU memory, and no GPU is visible", "name a config")
        name = lm_config.pick_for_vram(vram_mib)
    raw = lm_config.nested(name if isinstance(name, Mapping) else lm_config.load(str(name)))
    # each layer in the same form, so that nsa.l and model.nsa are the same key in all of them
    merge(raw, lm_config.nested({k: v for k, v in job.items() if k not in _OWN}))
    merge(raw, lm_config.nested(job.get("overrides") or {}))
    merge(raw, {"train": {k: job[k] for k in ("steps", "seed") if job.get(k) is not None}})
    return lm_config.from_mapping(raw)


def merge(raw: dict[str, Any], over: Mapping[str, Any]) -> None:
    """Lay ``over`` upon ``raw`` in place, section by section."""
    for key, value in over.items():
        below = raw.get(key)
        if isinstance(value, Mapping):
            raw[key] = dict(below) if isinstance(below, Mapping) else {}
            merge(raw[key], value)
        else:
            raw[key] = value


def check_plan(cfg: LMConfig, plan: Mapping[str, Any]) -> None:
    """Refuse a config that is not the one that was planned (parameters, seq_len, precision, save_every, steps)."""
    facts: dict[str, Callable[[], object]] = {
        "parameters": lambda: _parameters(cfg),
        "seq_len": lambda: cfg.train.seq_len,
        "precision": lambda: cfg.runtime.precision,
        "save_every": lambda: cfg.train.save_every,
        "steps": lambda: cfg.train.steps,
    }
    for key, wanted in plan.items():
        if key not in facts:
            raise ConfigError(f"plan.{key} is unknown", f"known: {', '.join(facts)}")
        if (found := facts[key]()) != wanted:
            raise ConfigError(f"{key} is {found}, the plan says {wanted}", "fix the config or the plan")


def _parameters(cfg: LMConfig) -> int:
    from uvcc_engine.nsa.model import parameter_count  # torch counts them, and settings are read without it

    return parameter_count(cfg.model)


def check_world(cfg: LMConfig, world: int) -> None:
    """Refuse ranks that ``ddp.tensor`` or ``ddp.context`` does not divide, and a batch that they cannot share evenly: a
    rank without rows would hang the others."""
    for name in ("tensor", "context"):
        if world % getattr(cfg.ddp, name):
            what = f"ddp.{name}={getattr(cfg.ddp, name)} of {world} ranks"
            raise ConfigError(what, "make the ranks a multiple of it")
    together = cfg.ddp.tensor * cfg.ddp.context
    replicas = world // together
    if cfg.train.batch_size % replicas:
        each = f" in {replicas} groups of {together}" if together > 1 else ""
        raise ConfigError(
            f"train.batch_size={cfg.train.batch_size} cannot be shared by {world} ranks{each}",
            f"make it a multiple of {replicas}",
        )


def overrides(pairs: Sequence[str]) -> dict[str, Any]:
    """``section.key=value`` texts as sections; values are YAML. Raises ConfigError."""

    found: dict[str, Any] = {}
    for pair in pairs:
        path, _, value = pair.partition("=")
        section, _, key = path.partition(".")
        if not key or not value:
            raise ConfigError(f"--set {pair}", "write it like --set train.steps=100")
        found.setdefault(section, {})[key] = yaml_text.load(value)
    return found
