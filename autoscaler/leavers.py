"""Who leaves a pool that shrinks. Pure."""

from collections.abc import Sequence

from autoscaler.figures import WorkerFigures


def choose_leavers(
    starting: Sequence[WorkerFigures],
    serving: Sequence[WorkerFigures],
    count: int,
    *,
    by_number: bool,
) -> tuple[str, ...]:
    """Names so many: those that only start, the newest first; then the least busy.

    Args:
        starting: in the order in which they were ordered.
        serving: in any order.
        count: how many, at most.
        by_number: the highest number leaves first, whoever that is. Then it may be fewer: one that
            serves does not leave while one below it starts.
    """
    if by_number:
        return _last_numbers(starting, serving, count)
    names = [worker.worker_id for worker in reversed(starting)]
    names += [worker.worker_id for worker in sorted(serving, key=busyness)]
    return tuple(names[:count])


def busyness(worker: WorkerFigures) -> tuple[int, int]:
    """Orders replicas by what they have."""
    return (worker.num_running + worker.num_waiting + worker.num_held, worker.used_blocks)


def is_empty(worker: WorkerFigures) -> bool:
    """Says whether a replica has nothing to do."""
    return not any(busyness(worker)) and not worker.queued_tokens


def _last_numbers(
    starting: Sequence[WorkerFigures], serving: Sequence[WorkerFigures], count: int
) -> tuple[str, ...]:
    start, serve = ({one.worker_id for one in pool} for pool in (starting, serving))
    names = sorted(start | serve, key=_number, reverse=True)[:count]
    if start - set(names) and serve & set(names):
        names = [name for name in names if name in start]
    return tuple(names)


def _number(worker_id: str) -> int:
    return int(worker_id.rpartition("-")[2])
