"""What an autoscaler sees of workers, through a router."""

import asyncio
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import pytest

from autoscaler.sample_feed import SampleFeed
from launcher.pool import Member
from launcher.pool_figures import ClusterFigures
from pdserve.predictor.predictor import NUM_WARM_UP_SAMPLES, Predictor
from pdserve.request import Role
from pdserve.rpc.v1 import types_pb2
from tests.support.fake_worker import FakeWorker
from tests.support.router_harness import Cluster, run_cluster
from tests.support.text_models import make_text_model


class Launched:
    """A launcher that has started one decode worker."""

    def __init__(self, cluster: Cluster, worker: FakeWorker) -> None:
        self.cluster = cluster
        self.worker = worker

    def members(self) -> tuple[Member, ...]:
        one = Member(
            worker_id=self.worker.worker_id,
            role=Role.DECODE,
            face_pid=1,
            num_restarts=0,
            is_draining=False,
            record=self.worker.record(),
        )
        return (one,)

    def router_addresses(self) -> tuple[str, ...]:
        return (f"127.0.0.1:{self.cluster.port}",)


@pytest.mark.parametrize(
    ("num_reports", "frozen_looks"),
    [
        pytest.param([1] * 12, (), id="a report a look"),
        pytest.param([5] * 6, (), id="five reports a look"),
        pytest.param([1, 0, 0] * 6, (), id="three looks a report"),
        pytest.param([3, 1, 0, 7, 2, 4], (), id="anyhow"),
        pytest.param([2] * 8, (3, 4), id="a worker that does not answer for a while"),
    ],
)
async def test_each_sample_is_learned_once_however_often_is_reported_and_looked(
    num_reports: Sequence[int], frozen_looks: Sequence[int], tmp_path: Path
) -> None:
    predictor, numbers = Predictor(), count(1)
    feed = SampleFeed(predictor)
    # It goes on to stream while it answers no call.
    async with run_cluster(make_text_model(tmp_path), worker_silence_s=60.0) as cluster:
        worker = await cluster.add("d0")
        await cluster.ready(1)
        with ClusterFigures(Launched(cluster, worker), None) as figures:
            for look, reports in enumerate(num_reports):
                for _ in range(reports):
                    step = types_pb2.DecodeStep(num_sequences=next(numbers))
                    worker.report(types_pb2.StepSample(seconds=0.1, decode=step))
                worker.is_frozen = look in frozen_looks
                feed.take((await asyncio.to_thread(figures.read)).workers)
    (quality,) = predictor.qualities()
    assert quality.num_samples == sum(num_reports) - NUM_WARM_UP_SAMPLES
