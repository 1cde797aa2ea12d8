"""What a party shows each peer after an epoch or the run: its own signed statement, and one of the third party."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from uvcc_engine.contract.errors import UnreadableError
from uvcc_engine.contract.run_files.records import Malformed
from uvcc_engine.transcript.signed.statements import Signed, exact

About = Literal["root", "result"]


@dataclass(frozen=True)
class AgreementMessage:
    """``signed``: the sender's root or result; ``third``: the third party's root of the epoch before, as shown to it.

    What is signed is not checked here, nor by whom.
    """

    about: About
    signed: Signed
    third: Signed | None

    def encode(self) -> bytes:
        """The message as it travels: canonical JSON."""
        third = self.third.spelled if self.third is not None else b"null"  # its name is the last in canonical order
        return b'{"%s":%s,"third":%s}' % (self.about.encode(), self.signed.spelled, third)

    @classmethod
    def parse(cls, about: About, body: bytes) -> AgreementMessage | Malformed:
        """The message that a body holds, or what is wrong with it. Total: a peer may send any bytes."""
        try:
            found = exact(json.loads(body), (about, "third"), "control message")
            third = Signed.from_json(found["third"]) if found["third"] is not None else None
            return cls(about, Signed.from_json(found[about]), third)
        except UnreadableError as error:
            return Malformed(f"an unreadable {about}: {error.what}")
        except (ValueError, RecursionError):
            return Malformed(f"an unreadable {about}: not JSON")
