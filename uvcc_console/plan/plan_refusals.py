"""What a plan alone shows that cannot go well: said by ``uvcc plan``, and by a rollout before anything is rented."""

from __future__ import annotations

from uvcc_console.fleet.prime.offers import IMAGES
from uvcc_console.plan import images, lm_settings, measurable
from uvcc_console.plan.plan import FULL, SMOKE, Plan
from uvcc_console.plan.schema import CommandJobSettings, LmJobSettings, PrivateJobSettings
from uvcc_engine.contract.errors import ConfigError


def check(plan: Plan) -> None:
    """Hold the job against its images, its settings and its gates. Raises ConfigError naming the first that does not
    fit."""
    job, gates = plan.profile.job, plan.profile.gates
    if isinstance(job, LmJobSettings | PrivateJobSettings):
        images.check_all(plan.profile.fleet.model_dump(mode="json"), {"prime": IMAGES})
    if isinstance(job, LmJobSettings):
        measurable.check_settings(lm_settings.check(plan), gates)
    if (smoke := plan.phases.get(SMOKE)) is not None:
        if isinstance(job, LmJobSettings):
            measurable.check(job, smoke.steps, gates)
        if isinstance(job, PrivateJobSettings):
            measurable.check_private(job, smoke.steps, gates)
    if (full := plan.phases.get(FULL)) is not None:
        _check_warmup(job, full.steps)
        every = measurable.log_every(job) if isinstance(job, LmJobSettings) else 1
        measurable.check_windows(full.steps, gates, every)
        measurable.check_resume(job, full.steps, gates)


def _check_warmup(job: PrivateJobSettings | LmJobSettings | CommandJobSettings, steps: int) -> None:
    """Refuse (ConfigError) a warm-up in which the full run would end: its learning rate never comes."""
    if isinstance(job, PrivateJobSettings):
        name, warmup = "job.warmup", job.warmup
    elif isinstance(job, LmJobSettings):
        name, warmup = "job.overrides.train.warmup", job.overrides.get("train", {}).get("warmup", 0)
    else:
        return
    if isinstance(warmup, int) and warmup > steps:
        what = f"{name} is {warmup}, and the full run has {steps} steps: it would never reach its learning rate"
        raise ConfigError(what, f"a warm-up of at most {steps}, or more steps")
