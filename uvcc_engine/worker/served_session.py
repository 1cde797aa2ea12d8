"""A worker's session that serves a model: it waits for queries, agrees on a batch, answers it, hands the answers out.

Between two batches the parties exchange votes, so that a hold or a halt takes effect while nobody asks as well. Answers
leave only after all three agreed on the transcript of the step that computed them.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

from uvcc_engine.contract.errors import ProtocolError
from uvcc_engine.contract.parsing.canonical import sorted_json
from uvcc_engine.contract.peer_protocol.peer_messages import HALT, HOLD, BatchTurn, Vote
from uvcc_engine.contract.run_files.records import Malformed
from uvcc_engine.sealing.queries import ServedJob, most_rows, seal_answer
from uvcc_engine.transcript.formats import kinds
from uvcc_engine.worker.checkpoints import KEPT
from uvcc_engine.worker.query_desk import QueryDesk
from uvcc_engine.worker.served_batches import BatchTerms, DeskWord, QueryBatch, read_word
from uvcc_engine.worker.served_model import ServedModel
from uvcc_engine.worker.session import WorkerSession

SHORTEST_S: Final = 0.02
LONGEST_S: Final = 0.5
"""Between two turns of waiting: from the one, while queries come, to the other, while nobody asks."""
FAREWELL_S: Final = 10.0
"""For the last answers to reach the relay, once the last batch is over."""


class ServedSession(WorkerSession):
    """Drives a served model of one admitted worker over an open plane."""

    PHASE = "serve"

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        a = self._admitted
        assert isinstance(self._trainer, ServedModel)
        self._model = self._trainer
        rows = most_rows(a.job.batch, a.model.features, a.model.classes * a.model.positions)
        served = ServedJob(a.policy.sid_job.hex(), a.job.clients, a.model.features, rows, a.job.frac_bits)
        self._desk = QueryDesk(
            Path(self._spec.dir),
            served,
            party=a.party,
            identity=a.identity,
            link=self._spec.link,
            tell=lambda name, fields: self._writer.event(name, "warn", **fields),
        )
        self._terms = BatchTerms(a.job.batch, may_be_empty=a.job.idle > 0)
        self._opened = False
        self._began = 0.0
        self._batch: QueryBatch = ()
        self._told = ""

    def close(self) -> None:
        """Release what the session and its desk hold. Harmless twice."""
        self._desk.close(FAREWELL_S if self.step == self._admitted.job.steps else 0.0)
        super().close()

    # -- before a step -----------------------------------------------------------------------------------------------

    def _before_step(self) -> Vote:
        if not self._opened:
            self._desk.open()
            self._opened = True
        turn, pause = 0, SHORTEST_S
        while True:
            mine, word = self._vote(), self._desk.word(self.step, self._admitted.job.idle)
            note = word.encode()
            said = BatchTurn(self.step, turn, mine, note)
            decision, notes = self._table.turn(said, {p: note for p in self._table.peers})
            if decision.vote == HOLD:
                decision, self._told = self._hold(decision), ""
            if decision.vote == HALT:
                self._halting = decision
                return decision
            words = {p: _word_of(p, told) for p, told in notes.items()} | {self._admitted.party: word}
            self._desk.forget_stale([words[p] for p in self._table.peers])
            batch = None if decision.vote == HOLD else self._desk.agree(words, self.step, self._terms)
            if batch is not None:
                self._begin_batch(batch)
                return Vote()
            self._say_news()
            self._desk.wait(pause)
            turn, pause = turn + 1, min(2 * pause, LONGEST_S)

    def _begin_batch(self, batch: QueryBatch) -> None:
        self._model.batch = self._desk.decide(self.step, batch)
        self._batch = batch
        self._began = time.monotonic()

    def _train_step(self, step: int) -> Vote:
        decision = super()._train_step(step)
        self._settle_roots()
        return decision

    def _begin(self, epoch: int) -> Vote:
        mine = super()._begin(epoch)
        if epoch < self._epoch(self._admitted.job.steps):
            told = sorted_json([q.to_json() for q in self._batch]).encode()
            self._proof.recorder.record_local((epoch, 0, 0, kinds.PIPELINE), told)
        return mine

    def _rows(self) -> int:
        return sum(q.rows for q in self._batch)

    # -- after it ----------------------------------------------------------------------------------------------------

    def _after_step(self) -> None:
        a, step = self._admitted, self.step - 1
        took = time.monotonic() - self._began
        sealed = [
            (
                query,
                f"{query.id[:40]}-{self._spec.attempt}",
                seal_answer(
                    (first, second),
                    query=query.id,
                    batch=step,
                    attempt=self._spec.attempt,
                    party=a.party,
                    frac_bits=a.job.frac_bits,
                    identity=a.identity,
                    client=a.job.clients[query.client],
                    sid_job=a.policy.sid_job.hex(),
                ),
            )
            for query, first, second in self._model.answers
        ]
        self._desk.deliver(sealed)
        clients = len({q.client for q in self._batch})
        figures = {"queries": len(self._batch), "rows": self._rows(), "clients": clients, "seconds": round(took, 3)}
        told: dict[str, Any] = {"step": step, **figures, **_latency(self._desk.figures())}
        self._writer.event("batch_answered", **told)
        self._say_news()
        if self.step % a.job.checkpoint_every == 0:
            self._desk.forget(step - (KEPT + 1) * a.job.checkpoint_every)

    def _say_news(self) -> None:
        """Say what is new at the desk. What is not is said again by the thread that keeps heartbeats fresh: of a model
        that nobody asks for weeks two lines a second would fill the journal."""
        said = self._said()
        if (news := f"{self.step} {said}") != self._told and self._writer.heartbeat(self.step, self.PHASE, said):
            self._told = news

    def _said(self) -> str:
        found = self._desk.figures()
        text = f"{found['answered']} queries of {found['clients']} clients answered, {found['waiting']} waiting"
        if "p50_s" in found:
            text += f", half within {found['p50_s']:.2f} s, 95 % within {found['p95_s']:.2f} s"
        return text + (f", {found['refused']} refused" if found["refused"] else "")


def _latency(figures: dict[str, Any]) -> dict[str, Any]:
    return {name: figures[name] for name in ("p50_s", "p95_s", "waiting", "refused") if name in figures}


def _word_of(party: int, note: bytes) -> DeskWord:
    found = read_word(note)
    if isinstance(found, Malformed):
        raise ProtocolError(f"P{party} sent {found.why}", party=party)
    return found
