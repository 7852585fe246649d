"""Dashboards, alerts and the scrape: they ask only for series that pdserve has."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from prometheus_client import CollectorRegistry

from pdserve.face.collector import WorkerCollector
from pdserve.request import FrontId
from router.cache_watch import CacheWatch
from router.index_metrics import IndexCollector
from router.metrics import RouterMetrics
from router.openai.metrics import HttpMetrics
from router.predictor_metrics import PredictorMetrics
from router.prefix_index import PrefixIndex
from router.worker_pool import WorkerPool
from tests.support.manifests import DEPLOY, parse_documents, pods

DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "pdserve.json").read_text("utf-8"))
ALERTS = DEPLOY / "prometheus" / "alerts.yaml"
SCRAPE = DEPLOY / "prometheus" / "prometheus.yaml"
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
NAME = re.compile(r"\b(?:vllm:|pdserve_)[a-z0-9_]+")
LABELS = {
    *("model_name", "engine", "role", "cause", "path", "reason", "finished_reason", "transport"),
    *("worker_class", "kind", "unit"),
    *("le", "job", "pod"),
}
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool here")


def series() -> set[str]:
    """Every name that a router or a worker shows."""
    registry = CollectorRegistry()
    RouterMetrics(registry, "m")
    HttpMetrics(registry, ["/health"])
    PredictorMetrics(registry, "m", "0")
    index = PrefixIndex()
    # Nobody is watched, so the pool is not asked.
    watch = CacheWatch(cast("WorkerPool", None), index, FrontId("front"))
    registry.register(IndexCollector("m", index, watch))
    families = [*registry.collect(), *WorkerCollector("m", "decode-0", "decode").collect()]
    return {
        f"{family.name}{suffix}" for family in families for suffix in SUFFIXES[family.type]
    }  # fmt: skip


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def dashboard_queries() -> Iterator[str]:
    for panel in panels():
        for target in panel["targets"]:
            yield target["expr"]


def alert_queries() -> list[str]:
    (document,) = parse_documents(ALERTS.read_text("utf-8"))
    return [rule["expr"] for group in document["groups"] for rule in group["rules"]]


QUERIES = [*dashboard_queries(), *alert_queries()]


@pytest.mark.parametrize("query", QUERIES)
def test_every_series_of_a_query_exists(query: str) -> None:
    names = set(NAME.findall(query)) or set(re.findall(r"\bup\b", query))
    assert names
    assert names - {"up"} <= series()


@pytest.mark.parametrize("query", QUERIES)
def test_every_label_of_a_query_is_one_that_our_series_have(query: str) -> None:
    grouped = re.findall(r"by \(([^)]*)\)", query)
    labels = {name.strip() for group in grouped for name in group.split(",")}
    labels |= set(re.findall(r"([a-z_]+)\s*=~?\"", query))
    assert labels <= LABELS


def test_a_series_that_does_not_exist_would_be_seen() -> None:
    assert "pdserve_requests_total" in series()
    assert "pdserve_requests" not in series()
    assert "pdserve_time_to_first_token_seconds_bucket" in series()


def test_the_series_that_must_stay_at_zero_are_on_the_dashboard_and_alarmed() -> None:
    wanted = "pdserve_recomputed_prompt_tokens_total"
    assert any(wanted in query for query in dashboard_queries())
    assert any(wanted in query for query in alert_queries())


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    every = DASHBOARD["panels"]
    assert len({panel["id"] for panel in every}) == len(every) > 20
    taken: set[tuple[int, int]] = set()
    for panel in every:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken
        taken |= cells


def test_every_panel_asks_the_source_that_the_viewer_chose() -> None:
    names = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert names == {"datasource", "model"}
    for panel in panels():
        assert panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters)


def test_the_scrape_finds_the_port_that_pods_call_metrics() -> None:
    (config,) = parse_documents(SCRAPE.read_text("utf-8"))
    (job,) = config["scrape_configs"]
    kept = {tuple(r["source_labels"]): r["regex"] for r in job["relabel_configs"] if "regex" in r}
    assert kept[("__meta_kubernetes_pod_container_port_name",)] == "metrics"
    assert kept[("__meta_kubernetes_pod_label_app_kubernetes_io_part_of",)] == "pdserve"
    found = [
        pod
        for pod in pods()
        if any(port["name"] == "metrics" for port in pod.container.get("ports", []))
    ]
    assert {pod.component for pod in found} == {"router", "prefill", "decode"}
    for pod in found:
        (port,) = [p for p in pod.container["ports"] if p["name"] == "metrics"]
        assert port["containerPort"] == int(pod.flag("--metrics-port") or 0) == 9400


@needs_promtool
def test_prometheus_takes_the_alerts_and_they_ring_when_they_should() -> None:
    check("test", "rules", str(DEPLOY / "prometheus" / "alerts.test.yaml"))


@needs_promtool
def test_prometheus_takes_the_scrape(tmp_path: Path) -> None:
    (config,) = parse_documents(SCRAPE.read_text("utf-8"))
    (job,) = config["scrape_configs"]
    # Debian's Prometheus is built without discovery in Kubernetes.
    (found,) = job.pop("kubernetes_sd_configs")
    assert found == {"role": "pod", "namespaces": {"names": ["pdserve"]}}
    config["rule_files"] = [str(ALERTS)]
    path = tmp_path / "prometheus.yaml"
    path.write_text(yaml.safe_dump(config))
    check("check", "config", str(path))


@needs_promtool
def test_prometheus_takes_every_query_of_the_dashboard(tmp_path: Path) -> None:
    texts = [
        query.replace("$__rate_interval", "1m").replace("$model", ".*")
        for query in dashboard_queries()
    ]
    rules = [{"record": f"panel:{index}", "expr": text} for index, text in enumerate(texts)]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    check("check", "rules", str(path))


def check(*argv: str) -> None:
    done = subprocess.run(["promtool", *argv], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
