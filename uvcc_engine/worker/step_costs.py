"""What a step of a worker takes on average: message rounds, and bytes to its peers without frames. For the score of a
plan, which foretold both."""

from __future__ import annotations

from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.mpc.foundation.claim_ledger import ProvedStep
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.proofs.audit_draws import audited


def audits_of(job: PrivateJob, proved: ProvedStep | None) -> int:
    """How many of the parties a step's coins drew for an audit; 0 where the job proves every step, or none."""
    rarely = job.proving.audit_one_in
    return len(audited(proved.drawn, rarely)) if rarely and proved is not None else 0


class StepCosts:
    """Counts what this worker's runtimes do between :meth:`begin` and :meth:`end`, which enclose a step.

    A step that is begun and not ended is left out: those that validate, and the first, which may take statistics.
    """

    def __init__(self) -> None:
        self.runtimes: list[Runtime] = []
        self._steps = self._rounds = self._bytes = self._audits = self._audited = 0
        self._before = (0, 0)

    def of(self, runtime: Runtime) -> Runtime:
        """Count what this runtime does as well; returns it."""
        self.runtimes.append(runtime)
        return runtime

    def _so_far(self) -> tuple[int, int]:
        return sum(rt.rounds for rt in self.runtimes), sum(rt.bytes_sent for rt in self.runtimes)

    def begin(self) -> None:
        """A step begins."""
        self._before = self._so_far()

    def end(self, audits: int = 0) -> None:
        """The step that was begun last counts; ``audits``: of how many parties."""
        rounds, sent = self._so_far()
        self._steps += 1
        self._rounds += rounds - self._before[0]
        self._bytes += sent - self._before[1]
        self._audits += audits
        self._audited += audits > 0

    def means(self) -> dict[str, float]:
        """``step_rounds`` and ``step_bytes`` of the steps so far, as a heartbeat tells them; nothing before the first.

        Side by side, rounds of several streams are counted one after another. Where parties were audited, how many a
        step (``step_audits``) and in which share of the steps (``step_audited``), on which both depend.
        """
        if not self._steps:
            return {}
        found = {
            "step_rounds": round(self._rounds / self._steps, 3),
            "step_bytes": round(self._bytes / self._steps, 1),
        }
        if self._audits:
            found["step_audits"] = round(self._audits / self._steps, 6)
            found["step_audited"] = round(self._audited / self._steps, 6)
        return found
