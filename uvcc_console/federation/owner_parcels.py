"""What a domain takes from the data owners at the rendezvous: its pods' sealed files, held against signed statements.

The files of several owners are laid side by side in the proposal's order, as the pods read them. No box is opened here.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from uvcc_console.federation.parcels import Parcels, box_of
from uvcc_console.federation.rendezvous import Rendezvous
from uvcc_console.fleet.download_folder import DownloadFolder
from uvcc_engine.contract.errors import ProtocolError
from uvcc_engine.contract.peer_protocol.record_names import OWNER_SHARES
from uvcc_engine.transcript.signed import owner_shares
from uvcc_engine.transcript.signed.owner_shares import OwnerPart, OwnerShare
from uvcc_engine.transcript.signed.roster import Roster
from uvcc_engine.transcript.terms.proposal import Proposal


@dataclass(slots=True)
class OwnerParcels:
    """The owners' files for one party of one attempt, as they arrive below ``folder``."""

    there: Rendezvous
    proposal: Proposal
    attempt: int
    rosters: Mapping[int, Roster]
    party: int
    folder: Path
    _parcels: dict[int, Parcels] = field(default_factory=dict)
    _bodies: dict[str, None] = field(default_factory=dict)
    _landed: set[int] = field(default_factory=set)

    def poll(self) -> list[int]:
        """Take what lies there; the numbers of the owners whose files are not whole yet. Raises UvccError."""
        shares = self._shares()
        for number in set(shares) - self._landed:
            box = box_of(self.proposal.id, self.attempt, f"owner/{number}")
            at, sender = self.folder / "incoming" / str(number), shares[number].mailbox
            coming = self._parcels.setdefault(number, Parcels(self.there, box, at, (sender,)))
            while coming.poll():
                pass
            self._land(number, coming, shares[number])
        return [number for number in range(len(self.proposal.owners)) if number not in self._landed]

    def laid(self, replicas: int) -> dict[str, Any]:
        """Write the pods' files, now that all are there; what the policy binds of them."""
        shares = self._held(())
        parts = [OwnerPart(shares[n].owner.x25519, shares[n].commitments) for n in sorted(shares)]
        first, *others = self._names(replicas)
        boxes = [self._box(number) for number in sorted(shares)]
        if len(parts) == 1:
            boxes[0].replace(self.folder / first)
        else:
            self._side_by_side(self.folder / first, parts, boxes)
        for name in others:  # every pod of the party is an addressee of the same box
            shutil.copyfile(self.folder / first, self.folder / name)
        commitments = parts[0].commitments if len(parts) == 1 else owner_shares.set_commitments(parts)
        return {"owner": parts[0].owner, "commitments": list(commitments)}

    def statements(self) -> list[str]:
        """What the owners signed, as it lay there and holds."""
        return list(self._bodies)

    def _shares(self) -> dict[int, OwnerShare]:
        """What the owners have signed by now; what was heard once stands, though the relay has forgotten it since."""
        lying = dict.fromkeys(self.there.look_bodies(f"{OWNER_SHARES}{self.proposal.id}/{self.attempt}/"))
        found = self._held(lying)
        self._bodies |= dict.fromkeys(b for b in lying if self._opened(b))
        return found

    def _held(self, more: Iterable[str]) -> dict[int, OwnerShare]:
        return owner_shares.gathered(self.proposal, self.attempt, self.rosters, [*self._bodies, *more])

    def _opened(self, body: str) -> bool:
        return any(owner_shares.share_opened(body, key) is not None for key in self.proposal.owners)

    def _land(self, number: int, coming: Parcels, share: OwnerShare) -> None:
        name, file = f"sealed-p{self.party}.bin", share.files[self.party]
        found = coming.arrived(share.mailbox).get(name)
        if found is None:
            return
        if found != (file.bytes, file.sha256):
            what = f"the file that came as owner {number}'s is not the one that it signed"
            raise ProtocolError(what, "whoever has that token at the relay sent it; have the owner share again")
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with DownloadFolder(self.folder) as downloads:
            coming.store(share.mailbox, name, downloads, (self._box(number).name,))
        self._landed.add(number)

    def _box(self, number: int) -> Path:
        return self.folder / f"owner-{number}.box"

    def _names(self, replicas: int) -> list[str]:
        return [f"sealed-p{self.party}r{r}.bin" if r else f"sealed-p{self.party}.bin" for r in range(replicas)]

    def _side_by_side(self, out: Path, parts: Sequence[OwnerPart], boxes: Sequence[Path]) -> None:
        with out.open("wb") as whole:
            whole.write(owner_shares.set_head(parts, [box.stat().st_size for box in boxes]))
            for box in boxes:
                with box.open("rb") as file:
                    shutil.copyfileobj(file, whole, 1 << 20)
        for box in boxes:
            box.unlink()
