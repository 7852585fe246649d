"""Keeps the worker's record alive in the registry; a registry that is away is no failure."""

import asyncio
import logging
from dataclasses import dataclass

from pdserve.registry.base import Registry, RegistryUnavailable, WorkerRecord

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Membership:
    """Registers the record and renews it every heartbeat."""

    registry: Registry
    record: WorkerRecord
    heartbeat_s: float
    lease_s: float
    _is_reachable: bool = True
    _has_left: bool = False

    async def run(self) -> None:
        """Renews until cancelled, or until it has left."""
        while not self._has_left:
            await self.renew()
            await asyncio.sleep(self.heartbeat_s)

    async def renew(self) -> None:
        """Writes the record once; logs when the registry goes and when it comes back.

        Does nothing after `leave`: a face that closes slowly must not look alive meanwhile.
        """
        if self._has_left:
            return
        try:
            await self.registry.register(self.record, self.lease_s)
        except RegistryUnavailable as error:
            if self._is_reachable:
                fields = {"worker_id": self.record.worker_id, "error": str(error)}
                logger.warning("registry is away", extra=fields)
            self._is_reachable = False
            return
        if not self._is_reachable:
            logger.info("registry is back", extra={"worker_id": self.record.worker_id})
        self._is_reachable = True

    async def leave(self) -> None:
        """Takes the record out for good; the lease does it if the registry is away."""
        self._has_left = True
        try:
            await self.registry.deregister(self.record.worker_id, self.record.incarnation)
        except RegistryUnavailable:
            logger.info("left without the registry", extra={"worker_id": self.record.worker_id})
