import sys
import time
from collections.abc import Iterator

import pytest

from launcher.place import LocalPlace
from launcher.replica import Replica
from launcher.supervision import LeaseWatch


@pytest.fixture
def replicas() -> Iterator[list[Replica]]:
    made: list[Replica] = []
    yield made
    for replica in made:
        replica.kill()


def python(code: str, lines: list[str], replicas: list[Replica], **watch: object) -> Replica:
    replica = Replica(
        "r0", [sys.executable, "-c", code], {}, lines.append, place=LocalPlace(), **watch
    )  # type: ignore[arg-type]
    replicas.append(replica)
    replica.start()
    return replica


def wait_end(replica: Replica) -> int:
    deadline = time.monotonic() + 30
    while replica.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    status = replica.poll()
    assert status is not None
    return status


def test_lines_are_forwarded_under_one_prefix(replicas: list[Replica]) -> None:
    lines: list[str] = []
    code = "import sys; print('a'); print('[r0] b'); print('c', file=sys.stderr)"
    replica = python(code, lines, replicas)
    assert wait_end(replica) == 0
    assert replica.last_line() in ("b", "c")
    assert sorted(lines) == ["[r0] a", "[r0] b", "[r0] c"]


def test_silent_end_has_a_last_line_of_its_own(replicas: list[Replica]) -> None:
    replica = python("raise SystemExit(3)", [], replicas)
    assert wait_end(replica) == 3
    assert replica.last_line() == "it said nothing"


def test_ended_child_starts_again_only_after_its_back_off(replicas: list[Replica]) -> None:
    lines: list[str] = []
    replica = python("raise SystemExit(3)", lines, replicas)
    wait_end(replica)
    now_s = time.monotonic()
    replica.revive(now_s)
    assert replica.num_restarts == 0
    assert lines == ["r0 ended (status 3); starts again in 0.25 s"]
    replica.revive(now_s + 0.2)
    assert replica.num_restarts == 0
    replica.revive(now_s + 0.3)
    assert replica.num_restarts == 1


def test_running_child_is_left_alone(replicas: list[Replica]) -> None:
    replica = python("import time; time.sleep(60)", [], replicas)
    replica.revive(time.monotonic() + 1000)
    assert replica.poll() is None
    assert replica.num_restarts == 0


def test_C9_frozen_child_is_killed(replicas: list[Replica]) -> None:
    def new_watch(now_s: float) -> LeaseWatch:
        return LeaseWatch(lease_s=1.0, start_timeout_s=5.0, now_s=now_s)

    replica = python("import time; time.sleep(60)", [], replicas, new_watch=new_watch)
    replica.revive(time.monotonic() + 4.0)
    assert replica.poll() is None
    replica.revive(time.monotonic() + 6.0)
    assert wait_end(replica) == -9


def test_killing_what_never_started_does_nothing() -> None:
    Replica("r0", ["nothing"], {}, lambda _: None, place=LocalPlace()).kill()


def test_retired_child_drains_and_is_not_started_again(replicas: list[Replica]) -> None:
    replica = python("import time; time.sleep(60)", [], replicas)
    replica.retire(time.monotonic() + 60)
    wait_end(replica)
    replica.revive(time.monotonic() + 1000)
    assert replica.is_retiring
    assert replica.num_restarts == 0
    assert replica.pid is None


def test_retired_child_that_overstays_is_killed(replicas: list[Replica]) -> None:
    lines: list[str] = []
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print('deaf', flush=True); time.sleep(60)"
    )
    replica = python(code, lines, replicas)
    deadline_s = time.monotonic() + 30
    while "[r0] deaf" not in lines:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    now_s = time.monotonic()
    replica.retire(now_s + 5)
    replica.revive(now_s + 4)
    assert replica.poll() is None
    replica.revive(now_s + 6)
    assert replica.poll() == -9
    assert "r0 overstays its drain: killing it" in lines
