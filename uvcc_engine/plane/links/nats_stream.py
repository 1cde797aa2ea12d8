"""The JetStream stream of one group of a run: made by whoever comes first, deleted by whoever leaves last.

A broker sets a stream's whole size aside for as long as the stream is there. Were those of ended runs left behind, a
broker with room for ten would refuse the eleventh run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

ANSWER_S: Final = 15
"""For a broker to take a party in: after nats-py's two seconds a busy machine was told of as a broker that is gone."""
_MAX_AGE_S: Final = 86_400
_ACK_WAIT_S: Final = 10  # what lay on a connection that broke is handed out again after so long
_DUPLICATE_WINDOW_S: Final = 120
_OTHER_SETTINGS: Final = 10058  # error codes of JetStream
_NO_STORE: Final = frozenset({10023, 10047})
_FULL_STREAM: Final = frozenset({10077})


@dataclass(frozen=True, slots=True)
class GroupStream:
    """A group's stream as one party sees it. ``group``, ``box``: words of a subject; ``max_bytes``: beyond it
    publishing is refused."""

    group: str
    box: str
    party: int
    max_bytes: int

    @property
    def name(self) -> str:
        return f"uvcc-{self.group}"

    @property
    def consumer(self) -> str:
        """What the broker keeps of this party's place in the stream."""
        return f"{self.box}-{self.party}"

    async def provide(self, client: Any) -> Any:
        """Make sure that the broker has the stream and this party's consumer; returns the pull subscription.

        A stream that is there already is taken as its operator has set it, who is told to raise the bound of a full
        one. Raises what nats-py raises.
        """
        from nats.js.api import AckPolicy, ConsumerConfig, DiscardPolicy, RetentionPolicy, StreamConfig
        from nats.js.errors import APIError

        jetstream = client.jetstream(timeout=ANSWER_S)
        wanted = StreamConfig(
            name=self.name,
            subjects=[f"uvcc.{self.group}.>"],
            retention=RetentionPolicy.WORK_QUEUE,
            discard=DiscardPolicy.NEW,  # a full stream refuses, it does not forget
            max_bytes=self.max_bytes,
            max_age=_MAX_AGE_S,
            duplicate_window=_DUPLICATE_WINDOW_S,
        )
        try:
            await jetstream.add_stream(wanted)
        except APIError as error:
            if error.err_code != _OTHER_SETTINGS:
                raise
            there = (await jetstream.stream_info(self.name)).config
            if (there.retention, there.discard, there.subjects) != (wanted.retention, wanted.discard, wanted.subjects):
                raise
        return await jetstream.pull_subscribe(
            f"uvcc.{self.group}.{self.box}.*.{self.party}",
            durable=self.consumer,
            stream=self.name,
            config=ConsumerConfig(ack_policy=AckPolicy.EXPLICIT, ack_wait=_ACK_WAIT_S, max_ack_pending=4096),
        )

    async def leave(self, client: Any) -> None:
        """This party reads no more: delete its consumer, and the stream once nobody else has one.

        Who was killed has its consumer there still, and finds the stream when it comes back. What a stream without
        readers holds is acknowledged to no sender by a peer, which sends it again where that peer returns. Raises what
        nats-py raises, also where both are gone already.
        """
        jetstream = client.jetstream()
        await jetstream.delete_consumer(self.name, self.consumer)
        if (await jetstream.stream_info(self.name)).state.consumer_count == 0:
            await jetstream.delete_stream(self.name)

    def words(self, error: Exception) -> str:
        """What went wrong, and what helps where the broker's limits are why."""
        if isinstance(error, TimeoutError):
            return "it did not answer in time"
        code = getattr(error, "err_code", None)
        size = f"{self.max_bytes >> 20} MiB"
        if code in _NO_STORE:
            cure = (
                f"raise jetstream.max_file_store in its configuration by {size}, make room on its disk, or delete the"
                " streams of runs that were killed (`nats stream ls`, `nats stream rm`)"
            )
            return f"it has no room for the stream {self.name} of {size}: {cure}"
        if code in _FULL_STREAM:
            cure = f"raise its max_bytes (`nats stream edit {self.name} --max-bytes=4GiB`)"
            return f"its stream {self.name} is full: {cure}, or see which party does not take its messages"
        return str(error) or type(error).__name__
