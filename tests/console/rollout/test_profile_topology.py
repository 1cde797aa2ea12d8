"""What a profile may ask for can be carried by the ids of the sessions, and both limits stand in one place."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from uvcc_console.plan.schema import TopologyPart
from uvcc_engine.contract.job.topology import MOST, MOST_OF_PROFILE, Topology


def test_the_most_that_a_profile_takes_is_a_topology() -> None:
    assert set(MOST_OF_PROFILE) == set(MOST) == set(TopologyPart.model_fields)
    for name, most in MOST_OF_PROFILE.items():
        Topology(**{name: TopologyPart(**{name: most}).model_dump()[name]})
        with pytest.raises(ValidationError):
            TopologyPart(**{name: most + 1})
