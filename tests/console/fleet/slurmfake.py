"""A Slurm cluster's commands in this process, by what Slurm's own say: a queue, states, and complaints on order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar

from cloudfake import CloudFake, Rented

from uvcc_console.fleet.vendors.slurm import Answer

MIN_JOB_AGE_S = 300.0  # so long slurmctld remembers a job that is over
_SAYS = {
    401: "Access/permission denied",
    400: "Batch job submission failed: Invalid partition name specified",
    500: "Unable to contact slurm controller (connect failure)",
    503: "Unable to contact slurm controller (connect failure)",
}


class SlurmFake(CloudFake):
    """``transport``: what runs a command. A job's script is the body of its create."""

    OPS: ClassVar = {
        "market": ("sinfo", ""),
        "create": ("sbatch", ""),
        "list": ("squeue", ""),
        "delete": ("scancel", ""),
    }

    def __init__(self, now: Any) -> None:
        super().__init__(now)
        self.transport = self.run  # type: ignore[assignment]

    def new_id(self) -> str:
        return str(next(self.numbers))

    async def run(self, argv: Sequence[str], stdin: bytes) -> Answer:
        tool = argv[0]
        if "--version" in argv:
            return 0, "slurm-wlm 22.05.8\n", ""
        if tool != "sh":
            self.requests.append((tool, " ".join(argv), [*argv, stdin.decode()]))
        for fault in self.faults:
            if fault.method == tool:
                fault.seen += 1
                if not fault.nth or fault.seen in fault.nth:
                    return self._complaint(fault, argv, stdin)
        answer: Answer = getattr(self, f"_{tool}")(argv, stdin)
        return answer

    def _complaint(self, fault: Any, argv: Sequence[str], stdin: bytes) -> Answer:
        tool = argv[0]
        if fault.action == "html" or (fault.action == "answer" and fault.status == 200):
            return 0, "Welcome to the cluster!\n" if fault.action == "html" else f"{json.dumps(fault.body)}\n", ""
        if fault.action == "answer":
            return 1, "", f"{tool}: error: {_SAYS[fault.status]}\n"
        if fault.action.startswith("commit_then_"):
            getattr(self, f"_{tool}")(argv, stdin)
            return 1, "", f"{tool}: error: Batch job submission failed: Socket timed out on send/recv operation\n"
        return 1, "", f"{tool}: error: {_SAYS[500]}\n"

    def _sinfo(self, argv: Sequence[str], stdin: bytes) -> Answer:
        up = "up" if self.stock > 0 else "down"
        return 0, f"main|{up}|gpu:H100:8(S:0-1)|infinite\nwest|{up}|gpu:H100:4|2-00:00:00\nold|up|(null)|1:00:00\n", ""

    def _sbatch(self, argv: Sequence[str], stdin: bytes) -> Answer:
        named = dict(arg.partition("=")[::2] for arg in argv)
        if len(self.living) >= self.quota:
            return 1, "", "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy\n"
        if self.stock <= 0:
            return 1, "", "sbatch: error: Batch job submission failed: Requested node configuration is not available\n"
        job = self.born(named["--job-name"], {"script": stdin.decode()}, named["--partition"])
        return 0, f"{job.id};lab\n", ""

    def _state(self, job: Rented) -> str:
        if job.dead is not None:
            return "CANCELLED" if job.deleting is not None else job.state or "NODE_FAIL"
        if job.deleting is not None:
            return "COMPLETING"
        return job.state or ("RUNNING" if self.ready(job) else "PENDING")

    def _squeue(self, argv: Sequence[str], stdin: bytes) -> Answer:
        only = next((a.partition("=")[2] for a in argv if a.startswith("--jobs=")), "")
        assert self.living is not None  # everybody has aged
        shown = [
            j
            for j in self.rented.values()
            if self.now() - j.born >= self.visible_after and (j.dead is None or self.now() - j.dead < MIN_JOB_AGE_S)
        ]
        if only and only not in {j.id for j in shown}:
            return 1, "", "slurm_load_jobs error: Invalid job id specified\n"
        why = {"PENDING": "Resources"}
        rows = [f"{j.id}|{(s := self._state(j))}|{why.get(s, 'None')}|{j.name}" for j in shown if only in ("", j.id)]
        return 0, "".join(f"{row}\n" for row in rows), ""

    def _scancel(self, argv: Sequence[str], stdin: bytes) -> Answer:
        status = self.end(argv[1])
        # the real one says nothing of a job that is over or never was
        return (0, "", "") if status in (200, 404) else (8, "", f"scancel: error: {_SAYS[500]}\n")

    def _sh(self, argv: Sequence[str], stdin: bytes) -> Answer:
        job = next((j for j in self.living if f"/{j.id}/address" in argv[-1]), None)
        return 0, f"me {job.host} 20123\n" if job is not None and self.ready(job) else "", ""
