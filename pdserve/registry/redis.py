"""Membership in Redis: a key per worker and per remote stage, JSON, expired when its lease ends."""

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Self, TypeVar

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from pdserve.registry.base import RegistryUnavailable, StageRecord, WorkerRecord, WorkerState
from pdserve.request import Incarnation, Role, WorkerId

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Compared inside Redis, so that no newer incarnation can slip in between. The incarnation travels
# as text: Lua's numbers are doubles and would confuse neighbours above 2**53.
_DELETE_OWN = """
local value = redis.call('GET', KEYS[1])
if value and cjson.decode(value)['incarnation'] == ARGV[1] then
  return redis.call('DEL', KEYS[1])
end
return 0
"""
_STATES: dict[str, WorkerState] = {"ready": "ready", "draining": "draining"}


class RedisRegistry:
    """A `Registry` over one Redis; every call ends within `timeout_s`."""

    def __init__(self, url: str, cluster: str, timeout_s: float = 2.0) -> None:
        """Prepares a client; nothing is connected before the first call.

        Args:
            url: `redis://host:port[/db]`, with user and password if needed.
            cluster: workers and routers see each other only within one cluster name.
            timeout_s: deadline of each call.
        """
        self._prefix = f"pdserve:{cluster}:worker:"
        self._stage_prefix = f"pdserve:{cluster}:stage:"
        self._timeout_s = timeout_s
        # One retry at once: the first call after a restart of Redis finds a dead pooled connection.
        self._client: Redis = Redis.from_url(
            url,
            decode_responses=False,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 1),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.aclose()

    async def register(self, record: WorkerRecord, lease_s: float) -> None:
        """Writes or renews a record; see `Registry`."""
        key = self._prefix + record.worker_id
        lease_ms = max(1, round(lease_s * 1000))
        await self._within_deadline(self._client.set(key, encode_record(record), px=lease_ms))

    async def deregister(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        """Removes a record of this very incarnation; see `Registry`."""
        key = self._prefix + worker_id
        await self._within_deadline(self._client.eval(_DELETE_OWN, 1, key, str(incarnation)))

    async def list_workers(self) -> tuple[WorkerRecord, ...]:
        """Returns the records whose lease holds; skips, with a warning, what it cannot read."""
        records = await self._list(self._prefix, decode_record)
        return tuple(sorted(records, key=lambda record: record.worker_id))

    async def register_stage(self, record: StageRecord, lease_s: float) -> None:
        """Writes or renews a stage's record; see `Registry`."""
        lease_ms = max(1, round(lease_s * 1000))
        call = self._client.set(self._stage_key(record), encode_stage(record), px=lease_ms)
        await self._within_deadline(call)

    async def deregister_stage(self, record: StageRecord) -> None:
        """Removes a stage's record of this very incarnation; see `Registry`."""
        incarnation = str(record.incarnation)
        call = self._client.eval(_DELETE_OWN, 1, self._stage_key(record), incarnation)
        await self._within_deadline(call)

    async def list_stages(self, worker_id: WorkerId) -> tuple[StageRecord, ...]:
        """Returns a worker's stages whose lease holds; see `Registry`."""
        records = await self._list(f"{self._stage_prefix}{worker_id}:", decode_stage)
        return tuple(sorted(records, key=lambda record: record.stage))

    def _stage_key(self, record: StageRecord) -> str:
        return f"{self._stage_prefix}{record.worker_id}:{record.stage}"

    async def _list(self, prefix: str, decode: Callable[[bytes | str], T]) -> list[T]:
        values = await self._within_deadline(self._read_all(prefix))
        records = []
        for key, value in values.items():
            try:
                records.append(decode(value))
            except (ValueError, KeyError, TypeError) as error:
                logger.warning(
                    "unreadable record skipped", extra={"key": key, "reason": repr(error)}
                )
        return records

    async def _read_all(self, prefix: str) -> dict[str, bytes | str]:
        pattern = re.sub(r"([\[\]?*\\^-])", r"\\\1", prefix) + "*"
        keys = sorted({key async for key in self._client.scan_iter(match=pattern, count=1000)})
        if not keys:
            return {}
        values = await self._client.mget(keys)
        found = zip(keys, values, strict=True)
        return {str(key): value for key, value in found if value is not None}

    async def _within_deadline(self, call: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await heed_cancel(call)
        except (RedisError, OSError, TimeoutError) as error:
            raise RegistryUnavailable(f"Redis does not answer: {error!r}") from error


async def heed_cancel(call: Awaitable[T]) -> T:
    """Awaits a call that may swallow a cancel, and raises the cancel behind it.

    The client sends through `asyncio.wait_for`, which up to Python 3.11 drops a cancel that comes
    in the very turn in which the send ends: a task that was cancelled once would go on for ever.

    Raises:
        CancelledError: this task was cancelled meanwhile.
    """
    task = asyncio.current_task()
    assert task is not None
    num_cancels = task.cancelling()
    result = await call
    if task.cancelling() > num_cancels:
        raise asyncio.CancelledError
    return result


def encode_record(record: WorkerRecord) -> bytes:
    """Encodes a record as JSON; 64-bit numbers and bytes as text."""
    fields = {
        "worker_id": record.worker_id,
        "role": record.role.value,
        "incarnation": str(record.incarnation),
        "address": record.address,
        "metrics_address": record.metrics_address,
        "state": record.state,
        "compatibility_digest": record.compatibility_digest.hex(),
        "geometry": record.geometry,
        "model": record.model,
        "max_model_len": record.max_model_len,
        "total_blocks": record.total_blocks,
        "block_size": record.block_size,
        "face_pid": record.face_pid,
        "rank_pids": list(record.rank_pids),
        "worker_class": record.worker_class,
        "max_num_seqs": record.max_num_seqs,
        "max_num_batched_tokens": record.max_num_batched_tokens,
        "kv_bytes_per_token": record.kv_bytes_per_token,
    }
    return json.dumps(fields).encode()


def decode_record(value: bytes | str) -> WorkerRecord:
    """Decodes what `encode_record` made; fields of later versions are ignored.

    Raises:
        ValueError: not JSON, or a field holds what it must not.
        KeyError: a field or a state is unknown.
        TypeError: the JSON has another shape.
    """
    fields = json.loads(value)
    return WorkerRecord(
        worker_id=WorkerId(str(fields["worker_id"])),
        role=Role(fields["role"]),
        incarnation=Incarnation(int(fields["incarnation"])),
        address=str(fields["address"]),
        metrics_address=str(fields["metrics_address"]),
        state=_STATES[fields["state"]],
        compatibility_digest=bytes.fromhex(fields["compatibility_digest"]),
        geometry=str(fields["geometry"]),
        model=str(fields["model"]),
        max_model_len=int(fields["max_model_len"]),
        total_blocks=int(fields["total_blocks"]),
        block_size=int(fields["block_size"]),
        face_pid=int(fields["face_pid"]),
        rank_pids=tuple(int(pid) for pid in fields["rank_pids"]),
        worker_class=str(fields.get("worker_class", "unknown")),
        max_num_seqs=int(fields.get("max_num_seqs", 256)),
        max_num_batched_tokens=int(fields.get("max_num_batched_tokens", 8192)),
        kv_bytes_per_token=int(fields.get("kv_bytes_per_token", 0)),
    )


def encode_stage(record: StageRecord) -> bytes:
    """Encodes a stage's record as JSON."""
    fields = {
        "worker_id": record.worker_id,
        "stage": record.stage,
        "incarnation": str(record.incarnation),
        "address": record.address,
    }
    return json.dumps(fields).encode()


def decode_stage(value: bytes | str) -> StageRecord:
    """Decodes what `encode_stage` made.

    Raises:
        ValueError: not JSON, or a field holds what it must not.
        KeyError: a field is missing.
        TypeError: the JSON has another shape.
    """
    fields = json.loads(value)
    return StageRecord(
        worker_id=WorkerId(str(fields["worker_id"])),
        stage=int(fields["stage"]),
        incarnation=Incarnation(int(fields["incarnation"])),
        address=str(fields["address"]),
    )
