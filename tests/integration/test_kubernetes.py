"""`pdserve autoscale` as a pod runs it: real workers, router and Redis; a stand-in API server."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster import running_cluster, wait_until
from tests.support.fake_kubernetes import FakeKubernetes, serving
from tests.support.models import tiny_llama_folder  # noqa: F401


@pytest.mark.soak
def test_pods_are_sized_by_what_redis_and_the_router_say(
    tiny_llama_folder: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    kube = FakeKubernetes()
    kube.replicas, kube.version = {"prefill": 0, "decode": 0}, {"prefill": 1, "decode": 1}
    (tmp_path / "token").write_text(kube.token)
    with running_cluster(tiny_llama_folder) as harness, serving(kube) as url:
        cluster = harness.cluster
        kube.add_pod("router-a", "router", ip="127.0.0.1")
        # The launcher's replicas stand in for the pods of the same names.
        for name in kube.replicas:
            kube.resize(name, 1)
        argv = [sys.executable, "-m", "launcher.cli", "autoscale", "--prefill", "1..3"]
        argv += ["--decode", "2..3", "--redis", cluster.redis_url, "--cluster", cluster.name]
        argv += ["--prefill-pool", "statefulset/prefill", "--decode-pool", "statefulset/decode"]
        argv += ["--router-port", cluster.address.rpartition(":")[2], "--namespace", "ns"]
        argv += ["--api-url", url, "--token-file", str(tmp_path / "token")]
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
        scaler = subprocess.Popen(argv, env=environment, stderr=subprocess.PIPE, text=True)
        try:
            wait_until(lambda: kube.replicas == {"prefill": 1, "decode": 2}, 60.0)
            status = [sys.executable, "-m", "launcher.cli", "scale", "--status"]
            shown = subprocess.run(
                status, env=environment, capture_output=True, text=True, check=True, timeout=60
            )
            assert "decode: grow 1 -> 2: below its range; 1 serve, 0 start" in shown.stdout
        finally:
            scaler.send_signal(signal.SIGTERM)
            assert scaler.stderr is not None
            lines = scaler.stderr.read()
            status_code = scaler.wait(30.0)
        assert status_code == 0, lines
        assert "decode: grow 1 -> 2: below its range" in lines
        assert kube.replicas == {"prefill": 1, "decode": 2}
