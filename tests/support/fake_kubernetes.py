"""A small API server of Kubernetes over real HTTP: two StatefulSets or Deployments, and pods.

It keeps what the real one promises of them: who is removed when a size falls, resource versions,
tokens, and answers that a test orders in their place.
"""

import json
import re
import ssl
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COST = "controller.kubernetes.io/pod-deletion-cost"
TOKEN = "token-1"
_SCALE = re.compile(r"/apis/apps/v1/namespaces/ns/(statefulsets|deployments)/([^/]+)/scale")
_POD = re.compile(r"/api/v1/namespaces/ns/pods/([^/]+)")
_PODS = "/api/v1/namespaces/ns/pods"

Json = dict[str, Any]


@dataclass
class FakeKubernetes:
    """What the server knows; tests change it at will."""

    kind: str = "statefulsets"
    token: str = TOKEN
    replicas: dict[str, int] = field(default_factory=dict)
    version: dict[str, int] = field(default_factory=dict)
    pods: dict[str, Json] = field(default_factory=dict)
    failures: deque[int | str] = field(default_factory=deque)
    """Statuses to answer the next calls with; `silence` never answers, `html` is no JSON."""
    conflicts: int = 0
    """So many writes find that somebody else has written meanwhile."""
    calls: list[tuple[str, str, Json | None]] = field(default_factory=list)
    num_made: int = 0

    def add_pool(self, role: str, count: int) -> None:
        self.replicas[f"pdserve-{role}"], self.version[f"pdserve-{role}"] = 0, 1
        self.resize(f"pdserve-{role}", count)

    def resize(self, name: str, count: int) -> None:
        """What the controllers of Kubernetes do, at once."""
        self.replicas[name] = count
        self.version[name] += 1
        while len(self.alive(name)) < count:
            self.num_made += 1
            suffix = self.num_made
            if self.kind == "statefulsets":
                taken = {int(pod.rpartition("-")[2]) for pod in self.alive(name)}
                suffix = next(i for i in range(count) if i not in taken)
            self.add_pod(f"{name}-{suffix}", name.removeprefix("pdserve-"))
        while len(self.alive(name)) > count:
            leaver = max(self.alive(name), key=self._deletion_order)
            self.pods[leaver]["metadata"]["deletionTimestamp"] = "2030-01-01T00:00:00Z"

    def _deletion_order(self, name: str) -> tuple[bool, int, int]:
        number = int(name.rpartition("-")[2])
        if self.kind == "statefulsets":
            return (False, 0, number)
        pod = self.pods[name]
        is_unready = pod["status"]["phase"] != "Running"
        return (is_unready, -int(pod["metadata"].get("annotations", {}).get(COST, 0)), number)

    def alive(self, name: str) -> list[str]:
        component = name.removeprefix("pdserve-")
        return [
            pod
            for pod, one in self.pods.items()
            if one["metadata"]["labels"]["app.kubernetes.io/component"] == component
            and "deletionTimestamp" not in one["metadata"]
        ]

    def add_pod(self, name: str, component: str, *, ip: str | None = None) -> None:
        labels = {
            "app.kubernetes.io/part-of": "pdserve",
            "app.kubernetes.io/component": component,
        }
        status: Json = {"phase": "Running"} if ip is None else {"phase": "Running", "podIP": ip}
        self.pods[name] = {"metadata": {"name": name, "labels": labels}, "status": status}

    def answer(self, method: str, target: str, body: Json | None) -> tuple[int, Json]:
        parts = urlsplit(target)
        path = unquote(parts.path)
        scale, pod = _SCALE.fullmatch(path), _POD.fullmatch(path)
        if scale is not None and scale[1] == self.kind and scale[2] in self.replicas:
            return self._answer_scale(method, scale[2], body)
        if method == "GET" and path == _PODS:
            wanted = dict(
                term.split("=") for term in parse_qs(parts.query)["labelSelector"][0].split(",")
            )
            found = [
                one
                for one in self.pods.values()
                if wanted.items() <= one["metadata"]["labels"].items()
            ]
            return 200, {"kind": "PodList", "items": found}
        if method == "PATCH" and pod is not None and pod[1] in self.pods:
            assert body is not None
            annotations = self.pods[pod[1]]["metadata"].setdefault("annotations", {})
            annotations.update(body["metadata"]["annotations"])
            return 200, self.pods[pod[1]]
        return 404, {"kind": "Status", "message": f"{path} not found", "code": 404}

    def _answer_scale(self, method: str, name: str, body: Json | None) -> tuple[int, Json]:
        if method == "PUT":
            assert body is not None
            if self.conflicts:
                self.conflicts -= 1
                self.version[name] += 1
            if body["metadata"]["resourceVersion"] != str(self.version[name]):
                return 409, {"kind": "Status", "message": "the object has been modified"}
            self.resize(name, body["spec"].get("replicas", 0))
        component = name.removeprefix("pdserve-")
        selector = f"app.kubernetes.io/part-of=pdserve,app.kubernetes.io/component={component}"
        spec = {"replicas": self.replicas[name]} if self.replicas[name] else {}
        return 200, {
            "kind": "Scale",
            "apiVersion": "autoscaling/v1",
            "metadata": {"name": name, "resourceVersion": str(self.version[name])},
            "spec": spec,
            "status": {"replicas": self.replicas[name], "selector": selector},
        }


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Says nothing of clients that went away: other tests read what is on stderr."""


@contextmanager
def serving(kube: FakeKubernetes, *, certificate: Path | None = None) -> Iterator[str]:
    """Serves on loopback, with TLS if there is a certificate with its key; yields the URL."""
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._serve()

        do_PUT = do_PATCH = do_GET  # noqa: N815

        def _serve(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            kube.calls.append((self.command, self.path, body))
            status, found = 200, {}
            failure = kube.failures.popleft() if kube.failures else None
            if failure == "silence":
                ended.wait(10.0)
                return
            if failure == "html":
                self._send(502, b"<html>bad gateway</html>")
                return
            if isinstance(failure, int):
                status, found = failure, {"kind": "Status", "message": f"ordered {failure}"}
            elif self.headers.get("Authorization") != f"Bearer {kube.token}":
                status, found = 401, {"kind": "Status", "message": "Unauthorized"}
            else:
                status, found = kube.answer(self.command, self.path, body)
            self._send(status, json.dumps(found).encode())

        def _send(self, status: int, text: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            """Keeps quiet."""

    server = _QuietServer(("127.0.0.1", 0), Handler)
    scheme = "http"
    if certificate is not None:
        scheme = "https"
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"{scheme}://127.0.0.1:{server.server_address[1]}"
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
        thread.join()
