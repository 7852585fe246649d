"""Figures of several fronts as those of one."""

from pdserve.rpc.v1 import inference_pb2
from router.front_desk import Info, join_infos, tell_alone


def test_counts_add_up_and_workers_count_that_all_can_use() -> None:
    own = Info(
        front_id="a",
        num_fronts=1,
        uptime_s=5,
        num_prefill=2,
        num_decode=3,
        requests_in_flight=1,
        requests_queued=1,
        requests_arrived=10,
        prompt_tokens=100,
        output_tokens=50,
        waiting_tokens=7,
        oldest_wait_s=0.5,
    )
    other = Info(
        front_id="b",
        num_fronts=1,
        uptime_s=9,
        num_prefill=2,
        num_decode=2,
        requests_in_flight=2,
        requests_arrived=5,
        prompt_tokens=11,
        output_tokens=3,
        waiting_tokens=1,
        oldest_wait_s=2.0,
    )
    brain = Info(num_prefill=1, num_decode=3)
    assert join_infos(own, [other, brain]) == Info(
        front_id="a",
        num_fronts=2,
        uptime_s=9,
        num_prefill=1,
        num_decode=2,
        requests_in_flight=3,
        requests_queued=1,
        requests_arrived=15,
        prompt_tokens=111,
        output_tokens=53,
        waiting_tokens=8,
        oldest_wait_s=2.0,
    )


def test_processes_come_by_name_and_each_says_of_itself_more_than_the_brain_does() -> None:
    def process(name: str, state: str = "serving") -> inference_pb2.RouterProcess:
        return inference_pb2.RouterProcess(name=name, state=state)

    own = Info(processes=[process("front-1")])
    other = Info(processes=[process("front-0", "draining")])
    brain = Info(
        processes=[process("front-0", "silent"), process("front-2", "silent"), process("brain")]
    )
    joined = join_infos(own, [other, brain])
    assert [(one.name, one.state) for one in joined.processes] == [
        ("front-0", "draining"),
        ("front-1", "serving"),
        ("front-2", "silent"),
        ("brain", "serving"),
    ]


def test_a_front_alone_tells_of_itself_and_how_old_all_else_is() -> None:
    process = inference_pb2.RouterProcess
    own = Info(requests_in_flight=3, num_decode=2, processes=[process(name="front-1", pid=7)])
    told = [process(name=f"front-{n}", pid=n, requests_in_flight=9) for n in (0, 1)]
    brain = process(name="brain", state="away", unheard_s=4.5)
    last = process(name="brain", pid=99, state="serving")
    assert tell_alone(own, brain, [*told, last], 6.0) == Info(
        requests_in_flight=3,
        num_decode=2,
        is_partial=True,
        processes=[
            process(name="front-0", pid=0, state="unknown", unheard_s=6.0),
            process(name="front-1", pid=7),
            brain,
        ],
    )
