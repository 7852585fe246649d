"""Names one life of one worker."""

from typing import NamedTuple

from pdserve.request import Incarnation, WorkerId


# A tuple: it is compared and hashed several times per token, which costs a dataclass 0.5 us each.
class WorkerKey(NamedTuple):
    """One life of one worker: a restart is another key."""

    worker_id: WorkerId
    incarnation: Incarnation
