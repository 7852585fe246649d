"""How long a replica takes to change its pool, beside how long a new one takes to start.

`python -m benchmarks.role_flips [1x1] [3x1] [1x2]`: tensor ranks x stages of each replica. A local
cluster with two prefill replicas and a decode replica, in float32.
"""

import statistics
import sys
import time
from collections.abc import Callable

from benchmarks.report import Row, write
from launcher.local_pool import LocalCluster
from launcher.model_source import resolve_model
from pdserve.config.cluster import ClusterConfig
from pdserve.config.engine import EngineConfig
from pdserve.request import Role

MODEL = "smollm2-135m"
SHAPES = ("1x1", "3x1", "1x2")
NUM_FLIPS = 4
"""There and back, twice."""
KV_BYTES = 64 * 2**20
TIMEOUT_S = 60.0
POLL_S = 0.01
FLIPPER = "prefill-1"
WORKLOAD = (
    f"{MODEL}, model cached, nobody asks anything: `flip`, from the order until the replica is "
    f"registered in the other pool, median of {NUM_FLIPS}; `start`, from the order until a new "
    "prefill replica is registered, beside three that idle"
)


def wait_s(is_done: Callable[[], bool]) -> float:
    """Returns how long something takes from now."""
    started_s = time.monotonic()
    while not is_done():
        if time.monotonic() - started_s > TIMEOUT_S:
            raise RuntimeError(f"not within {TIMEOUT_S:g} s")
        time.sleep(POLL_S)
    return time.monotonic() - started_s


def serves_as(cluster: LocalCluster, worker_id: str, role: Role) -> bool:
    """Says whether a replica has registered with a role."""
    found = [m.record for m in cluster.members() if m.worker_id == worker_id]
    return any(record is not None and record.role is role for record in found)


def flip_s(cluster: LocalCluster, role: Role) -> float:
    """Flips the replica and returns how long that took."""
    started_s = time.monotonic()
    cluster.flip(FLIPPER, role)
    wait_s(lambda: serves_as(cluster, FLIPPER, role))
    return time.monotonic() - started_s


def measure(shape: str) -> list[Row]:
    """Flips a replica there and back, then starts one more."""
    tensor, stages = map(int, shape.split("x"))
    engine = EngineConfig(
        model=MODEL,
        max_model_len=1024,
        kv_cache_memory_bytes=KV_BYTES,
        tensor_parallel=tensor,
        pipeline_parallel=stages,
    )
    config = ClusterConfig(
        engine=engine, num_prefill=2, can_flip=True, port=0, no_http=True, log_level="warning"
    )
    with LocalCluster(config) as cluster:
        roles = (Role.DECODE, Role.PREFILL) * (NUM_FLIPS // 2)
        flips_s = [flip_s(cluster, role) for role in roles]
        cluster.scale(Role.PREFILL, 3)
        start_s = wait_s(lambda: serves_as(cluster, "prefill-2", Role.PREFILL))
    return [
        Row(
            name=f"{shape}: flip",
            value=statistics.median(flips_s),
            unit="s",
            details={"runs_s": [round(one, 2) for one in flips_s]},
        ),
        Row(name=f"{shape}: start", value=start_s, unit="s"),
    ]


def main() -> None:
    """Measures the shapes named on the command line, or all."""
    resolve_model(MODEL)
    names = [name for name in SHAPES if name in sys.argv[1:]] or list(SHAPES)
    rows = [row for name in names for row in measure(name)]
    write("role_flips" if len(names) != 1 else f"role_flips-{names[0]}", WORKLOAD, rows)


if __name__ == "__main__":
    main()
