"""One worker's part of a fleet that trains: its rows, its stage, whom it talks to, and how all hear what one opens."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from uvcc_engine.contract.job.private_job import PrivateJob
from uvcc_engine.model.batch_place import BatchPlace
from uvcc_engine.model.definition.specs import ModelSpec
from uvcc_engine.model.parts import Borrowing
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.parallel.groups import PartyGroups
from uvcc_engine.parallel.pipeline import BACKWARD, FORWARD, Pipe
from uvcc_engine.sharding.microbatches import StreamRuntimes
from uvcc_engine.sharding.stage import Stage
from uvcc_engine.sharding.stage_passes import Pass, Settling, StagePart, my_rows


@dataclass(frozen=True, slots=True)
class FleetPart:
    """What one worker has of a job. ``tensors``: all rows, at every worker; ``stage``: its slices of its layers."""

    job: PrivateJob
    model: ModelSpec
    tensors: Mapping[str, Share]
    stage: Stage
    groups: PartyGroups
    pipe: Pipe
    runtimes: StreamRuntimes

    @property
    def opener(self) -> bool:
        """Whether this worker opens what the job reveals: one of each party does."""
        c = self.groups.place.coord
        return self.pipe.last and c.replica == 0 and c.tensor == 0

    def passing(
        self,
        rt: Runtime,
        rows: int,
        take: Callable[[StagePart, int, Tensor], None],
        batch: BatchPlace | None = None,
        settling: Settling | None = None,
    ) -> Pass:
        """A microbatch of so many rows of the data; ``take`` gets the gradients' terms. ``batch``, ``settling``: see
        ``Pass``."""
        return Pass(rt, self.groups.tp, rows * self.model.positions, take, batch=batch, settling=settling)

    def my_lines(self, name: str, rows: Tensor, width: int) -> Share:
        """This tensor rank's lines of some rows of a tensor, one per position: [lines, width]."""
        return self.tensors[name].index(rows).reshape(-1, width).map(lambda t: my_rows(self.groups.tp, t))

    def receive(self, direction: str, m: int) -> Share:
        """What comes from the stage before (forward) or behind: the shape that was sent."""
        both = self.pipe.receive(direction, m, self.runtimes.main.device)
        return Share(both[0], both[1], self.job.frac_bits)

    def send(self, direction: str, m: int, x: Share) -> None:
        """The inverse of :meth:`receive`."""
        self.pipe.send(direction, m, torch.stack([x.first, x.second]))

    def lend(self, first: int) -> None:
        """Where a later stage computes with a weight of the first, lend it, for passes from microbatch ``first`` on."""
        loan = self.stage.loan
        if loan is None:
            return
        if loan.lends:
            weight = loan.part.weights[0]
            self.pipe.hand(FORWARD, loan.other, first, torch.stack([weight.first, weight.second]))
            return
        assert isinstance(loan.part, Borrowing)
        both = self.pipe.take(FORWARD, loan.other, first, self.runtimes.main.device)
        loan.part.borrow(Share(both[0], both[1], self.job.frac_bits))

    def repaid(self) -> tuple[StagePart, Tensor] | None:
        """What the use of a lent weight adds to its gradient over a step's microbatches, ``[1 or 2, rows, columns]``,
        at the stage of the part that lent it; None at all others. All microbatches are back."""
        loan = self.stage.loan
        if loan is None:
            return None
        if loan.lends:
            return loan.part, self.pipe.take(BACKWARD, loan.other, 0, self.runtimes.main.device)
        assert isinstance(loan.part, Borrowing)
        self.pipe.hand(BACKWARD, loan.other, 0, torch.stack(loan.part.repay()))
        return None

    def summed(self, shares: Sequence[Share]) -> Share:
        """The sum of shares of one element over this list, the tensor ranks and the replicas of the last stage."""
        both = torch.stack([torch.stack([s.first, s.second]) for s in shares]).sum(0)
        self.groups.dp.sum_(self.groups.tp.sum_(both))
        return Share(both[0], both[1], shares[0].f)

    # -- what is opened ----------------------------------------------------------------------------------------------

    def told(self, value: float | None) -> float:
        """The number that the opener opened, at every worker of the party; the others give None."""
        one = torch.tensor([0.0 if value is None else value], dtype=torch.float64)
        return float(self._told(one.view(torch.int64)).view(torch.float64).item())

    def told_all(self, values: Mapping[str, float] | None) -> dict[str, float]:
        """The numbers that the opener opened, by name, at every worker of the party; the others give None."""
        text = b"" if values is None else json.dumps(dict(values)).encode()
        size = int(self.told(float(len(text))))
        padded = torch.frombuffer(bytearray(text.ljust(size)), dtype=torch.uint8)
        found: dict[str, float] = json.loads(self._told(padded).numpy().tobytes())
        return found

    def _told(self, value: Tensor) -> Tensor:
        groups = self.groups
        for group, source in ((groups.tp, 0), (groups.dp, 0), (groups.pp, groups.pp.size - 1)):
            group.broadcast_(value, source)
        return value
