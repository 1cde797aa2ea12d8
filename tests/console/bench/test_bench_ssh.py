"""The benchmark of many SSH connections opens all of them, and says so where it does not."""

from __future__ import annotations

import pytest

from uvcc_console.bench import ssh_links
from uvcc_engine.contract.errors import UvccError


@pytest.mark.ci(__file__)
def test_every_connection_is_opened_and_kept() -> None:
    seconds, memory = ssh_links.bench(1, pods=2, links=4)
    assert (seconds.name, seconds.metric, memory.metric) == ("ssh_500", "seconds", "bytes")
    assert 0 < seconds.value < 600
    assert 20 < memory.value < 400
    assert seconds.reference is not None


def test_pods_that_do_not_come_up_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh_links, "KEY", "another_key")  # the pods find no key that they shall let in
    with pytest.raises(UvccError, match="not every connection came up"):
        ssh_links.bench(1, pods=1, links=1)
