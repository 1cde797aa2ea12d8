"""Who operates a run, and how a party's own traffic is protected: stated in the policy, signed by all three, and shown.

A claim of privacy is only as strong as the way a run is operated. What this code does is written into the policy as
data, so that a certificate cannot promise more than the parties signed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from uvcc_engine.contract.errors import ConfigError
from uvcc_engine.contract.job.proof_mode import OFF, Proving
from uvcc_engine.contract.job.topology import Topology

ONE_OPERATOR: Final = "one"
THREE_DOMAINS: Final = "three"
NO_TRAFFIC: Final = "none"
SEALED: Final = "sealed"
NOTHING_PROVED: Final = Proving()
_FIELDS: Final = ("operators", "party_traffic")
_WORDS: Final = {
    ONE_OPERATOR: "one operator runs the data owner's program and all three domains, and could look at everything",
    THREE_DOMAINS: "each of three domains drives its own pods with keys of its own; two of them together could look",
    NO_TRAFFIC: "every party is one worker: nothing crosses between its own pods",
    SEALED: "traffic between a party's own pods is encrypted, and only those pods can join it",
}
BY_THREE: Final = _WORDS[THREE_DOMAINS]


@dataclass(frozen=True, slots=True)
class Operation:
    """How a run is operated. ``operators``: who drives the domains; ``party_traffic``: what crosses inside a party."""

    operators: str
    party_traffic: str

    @classmethod
    def of(cls, topology: Topology, *, apart: bool = False) -> Operation:
        """How this code operates a run of that size. ``apart``: each domain conducts its own part of it."""
        return cls(THREE_DOMAINS if apart else ONE_OPERATOR, SEALED if topology.workers_per_party > 1 else NO_TRAFFIC)

    @classmethod
    def from_json(cls, data: Any, topology: Topology, *, apart: bool = False) -> Operation:
        """Read strictly. Raises ConfigError for anything but what this code really does with such a topology."""
        true = cls.of(topology, apart=apart)
        if data != true.to_json():
            raise ConfigError(
                f"policy.operation is {str(data)[:120]}, a run of this size is operated as {true.to_json()}",
                f"it has the fields {', '.join(_FIELDS)} and may promise no more than this code does",
            )
        return true

    def to_json(self) -> Mapping[str, str]:
        return {"operators": self.operators, "party_traffic": self.party_traffic}

    def sentences(self, proving: Proving = NOTHING_PROVED) -> tuple[str, ...]:
        """What holds, for people; nothing about traffic or proofs that there are not."""
        said = (self.operators, self.party_traffic)
        return (
            *(_WORDS[word] for word in said if word != NO_TRAFFIC),
            *(proving.sentences if proving.mode != OFF else ()),
        )
