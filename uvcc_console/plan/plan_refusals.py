"""What a plan alone shows that cannot go well: said by ``uvcc plan``, and by a rollout before anything is rented."""

from __future__ import annotations

from uvcc_console.fleet.prime.offers import IMAGES
from uvcc_console.plan import images, lm_settings, measurable
from uvcc_console.plan.plan import FULL, SMOKE, Plan
from uvcc_console.plan.schema import LmJobSettings, PrivateJobSettings


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
        every = measurable.log_every(job) if isinstance(job, LmJobSettings) else 1
        measurable.check_windows(full.steps, gates, every)
        measurable.check_resume(job, full.steps, gates)
