"""What belongs to the account rather than to a pod: whose key it is, teams, the wallet, SSH keys, disks."""

from __future__ import annotations

from typing import Any

import httpx
from pydantic import ValidationError

from uvcc_console.fleet.cloud.calls import Call, Calls, CloudRefused, one
from uvcc_console.fleet.cloud.clock import Clock
from uvcc_console.fleet.cloud.fields import ident
from uvcc_console.fleet.prime.key import Account
from uvcc_console.fleet.prime.models import Disk, KeyOwner, SshKey, Team, TeamMember, Wallet
from uvcc_engine.contract.errors import UvccError


class AccountCalls(Calls):
    """Typed calls about the account."""

    def __init__(
        self, account: Account, *, transport: httpx.AsyncBaseTransport | None = None, clock: Clock | None = None
    ) -> None:
        super().__init__(f"{account.base_url}/api/v1", account.key, transport=transport, clock=clock)
        self.account = account

    async def whoami(self) -> KeyOwner:
        found = await self._get("/user/whoami")
        return one(KeyOwner, found.get("data", found) if isinstance(found, dict) else found)

    async def teams(self) -> list[Team]:
        return [one(Team, row) for row in await self._all("/user/teams")]

    async def team_members(self, team_id: str) -> list[TeamMember]:
        return [one(TeamMember, row) for row in await self._all(f"/teams/{team_id}/members")]

    async def wallet(self) -> float | None:
        """US dollars left; None where the API does not tell."""
        try:
            found = await self._get("/billing/wallet", ("teamId", self.account.team), ("limit", 1))
            wallet = Wallet.model_validate(found)
        except (UvccError, ValidationError):
            return None
        return wallet.balance_usd if wallet.currency in ("USD", "") else None

    async def ssh_keys(self) -> list[SshKey]:
        found = (one(SshKey, row) for row in await self._all("/ssh_keys/"))
        return list({key.id: key for key in found}.values())

    async def add_ssh_key(self, name: str, public_key: str) -> SshKey:
        body = {"name": name, "publicKey": public_key}
        return one(SshKey, await self._send(Call("POST", "/ssh_keys/", [], body, repeat=False)))

    async def make_primary(self, key_id: str) -> None:
        await self._send(Call("PATCH", f"/ssh_keys/{key_id}", [], {"isPrimary": True}))

    async def delete_ssh_key(self, key_id: str) -> None:
        try:
            await self._send(Call("DELETE", f"/ssh_keys/{key_id}", []))
        except CloudRefused as e:
            if e.kind != "missing":
                raise

    # disks

    async def disks(self) -> list[Disk]:
        return [one(Disk, row) for row in await self._all("/disks/")]

    async def disk(self, disk_id: str) -> Disk | None:
        """One disk; None if the API does not know it."""
        try:
            return one(Disk, await self._get(f"/disks/{disk_id}"))
        except CloudRefused as e:
            if e.kind != "missing":
                raise
            return None

    async def create_disk(self, disk: dict[str, Any], provider: str) -> Disk:
        """Order a disk. The request is never repeated, so that no second disk is paid for."""
        body: dict[str, Any] = {"disk": disk, "provider": {"type": provider}}
        if self.account.team:
            body["team"] = {"teamId": self.account.team}
        return one(Disk, await self._send(Call("POST", "/disks/", [], body, repeat=False)))

    async def rename_disk(self, disk_id: str, name: str) -> None:
        await self._send(Call("PATCH", f"/disks/{disk_id}", [], {"name": name}))

    async def delete_disk(self, disk_id: str) -> bool:
        """Ask for a disk's end; False where the API knows no such disk."""
        try:
            await self._send(Call("DELETE", f"/disks/{ident(disk_id, 'a disk')}", []))
        except CloudRefused as e:
            if e.kind != "missing":
                raise
            return False
        return True
