"""How `pdserve scale` and `flip` reach a launcher on this machine: gRPC on loopback, with a token.

The launcher writes address and token to a file that only its user can read.
"""

import hmac
import os
import secrets
import socket
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc

from autoscaler.controller import Controller
from autoscaler.figures import PoolNumbers, describe_law
from autoscaler.policy import POOLS
from autoscaler.settings import PoolRange
from launcher.client import bearer
from launcher.options.pools import SCALING_FLAGS
from pdserve.errors import ConfigError, PdserveError
from pdserve.request import Role
from pdserve.rpc.v1 import control_pb2, control_pb2_grpc

_SUFFIX = ".control"
_KNOCK_S = 1.0
Context = grpc.ServicerContext


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlFile:
    """Where a launcher listens, and the token that it wants to see."""

    path: Path
    address: str
    token: str

    def write(self) -> None:
        """Writes the file, for its owner alone.

        Raises:
            ConfigError: the folder belongs to somebody else.
        """
        folder = self.path.parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise ConfigError(f"{folder} belongs to another user")
        folder.chmod(0o700)
        self.path.unlink(missing_ok=True)
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as out:
            out.write(f"{self.address}\n{self.token}\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads a file.

        Raises:
            ConfigError: it is no such file.
        """
        lines = path.read_text(encoding="utf-8").split()
        if len(lines) != 2:
            raise ConfigError(f"{path} names no launcher")
        return cls(path=path, address=lines[0], token=lines[1])

    def is_left_behind(self) -> bool:
        """Says whether its launcher was killed: nobody listens any more."""
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=_KNOCK_S).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            # Frozen, or too busy to answer: it may be there.
            return False
        return False


def control_folder(runtime_folder: str | None) -> Path:
    """Returns the folder of control files: in the user's runtime folder, if there is one."""
    if runtime_folder:
        return Path(runtime_folder) / "pdserve"
    return Path(tempfile.gettempdir()) / f"pdserve-{os.getuid()}"


def find_control(folder: Path, cluster: str | None) -> ControlFile:
    """Returns the launcher of a cluster, or the only one there is.

    Without a name, files of launchers that were killed are taken away.

    Raises:
        ConfigError: there is none, or several and no name.
    """
    if cluster is not None:
        path = folder / f"{cluster}{_SUFFIX}"
        if not path.is_file():
            raise ConfigError(f"no launcher of a cluster named {cluster} runs here")
        return ControlFile.read(path)
    files = [ControlFile.read(path) for path in sorted(folder.glob(f"*{_SUFFIX}"))]
    living = []
    for file in files:
        if file.is_left_behind():
            file.path.unlink(missing_ok=True)
        else:
            living.append(file)
    if not living:
        raise ConfigError("no pdserve serve runs here")
    if len(living) > 1:
        names = ", ".join(file.path.stem for file in living)
        raise ConfigError(f"--cluster must name one of {names}")
    return living[0]


class ControlServer:
    """Listens on loopback while the launcher runs, and tells where in a file."""

    def __init__(
        self, controller: Controller, folder: Path, cluster: str, has_prefill: bool
    ) -> None:
        """Listens and writes the file."""
        token = secrets.token_hex(32)
        self._server = grpc.server(ThreadPoolExecutor(2, thread_name_prefix="control"))
        control_pb2_grpc.add_ControlServicer_to_server(
            ControlService(controller, token, has_prefill=has_prefill), self._server
        )
        port = self._server.add_insecure_port("127.0.0.1:0")
        self._file = ControlFile(
            path=folder / f"{cluster}{_SUFFIX}", address=f"127.0.0.1:{port}", token=token
        )
        # Whoever finds the file must find somebody who listens.
        self._server.start()
        self._file.write()

    @property
    def file(self) -> ControlFile:
        """Where it listens."""
        return self._file

    def stop(self) -> None:
        """Stops listening and takes the file away."""
        self._file.path.unlink(missing_ok=True)
        self._server.stop(0.5).wait()


class ControlService(control_pb2_grpc.ControlServicer):
    """Answers `pdserve scale` and `pdserve flip`."""

    def __init__(self, controller: Controller, token: str, *, has_prefill: bool) -> None:
        """Takes what decides, and what callers must show."""
        self._controller = controller
        self._expected = f"Bearer {token}"
        self._has_prefill = has_prefill

    def SetPools(  # noqa: N802 - the name of the RPC
        self, request: control_pb2.SetPoolsRequest, context: Context
    ) -> control_pb2.SetPoolsResponse:
        """Changes ranges, or says what that would do."""
        self._check(context)
        try:
            prefill = _from_wire(request.prefill) if request.HasField("prefill") else None
            decode = _from_wire(request.decode) if request.HasField("decode") else None
            if prefill is not None and prefill.most and not self._has_prefill:
                raise ConfigError("the cluster was started without a prefill pool")
            changes = self._controller.preview(prefill, decode)
            if not request.is_dry_run:
                self._controller.set_ranges(prefill, decode)
        except ConfigError as error:
            text = str(error.renamed(SCALING_FLAGS))
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
        return control_pb2.SetPoolsResponse(changes=changes)

    def FlipWorker(  # noqa: N802 - the name of the RPC
        self, request: control_pb2.FlipWorkerRequest, context: Context
    ) -> control_pb2.FlipWorkerResponse:
        """Lets a replica change its pool."""
        self._check(context)
        name = request.worker_id
        try:
            self._controller.flip(name, _role_of(request.role))
        except KeyError:
            context.abort(grpc.StatusCode.NOT_FOUND, f"there is no replica named {name[:64]!r}")
        except PdserveError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return control_pb2.FlipWorkerResponse()

    def GetWorker(  # noqa: N802 - the name of the RPC
        self, request: control_pb2.GetWorkerRequest, context: Context
    ) -> control_pb2.GetWorkerResponse:
        """Tells which role a replica has, and whether it serves in it."""
        self._check(context)
        name = request.worker_id
        try:
            found = self._controller.find_worker(name)
        except KeyError:
            context.abort(grpc.StatusCode.NOT_FOUND, f"there is no replica named {name[:64]!r}")
        if found is None:
            return control_pb2.GetWorkerResponse()
        return control_pb2.GetWorkerResponse(
            role=found.role, is_serving=found.is_serving and found.is_heard
        )

    def GetScaling(  # noqa: N802 - the name of the RPC
        self, request: control_pb2.GetScalingRequest, context: Context
    ) -> control_pb2.GetScalingResponse:
        """Tells what is known of each pool, and the last decisions."""
        self._check(context)
        settings, numbers = self._controller.settings, self._controller.numbers
        return control_pb2.GetScalingResponse(
            pools=[
                to_wire(role, settings.range_of(role), numbers[role])
                for role in POOLS
                if role in numbers
            ],
            decisions=[
                control_pb2.ScalingDecision(age_s=age_s, text=decision.describe())
                for age_s, decision in self._controller.history()
            ],
        )

    def _check(self, context: Context) -> None:
        shown = dict(context.invocation_metadata()).get("authorization", "")
        if not hmac.compare_digest(str(shown).encode(), self._expected.encode()):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the launcher's token is missing")


def call_control(file: ControlFile, ask: Callable[[control_pb2_grpc.ControlStub, Any], Any]) -> Any:
    """Asks a launcher; `ask` gets a stub and the metadata to show.

    Raises:
        ConfigError: it refused, or is gone.
    """
    with grpc.insecure_channel(file.address) as channel:
        try:
            return ask(control_pb2_grpc.ControlStub(channel), bearer(file.token))
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise ConfigError(f"the launcher of {file.path.stem} is gone") from error
            raise ConfigError(error.details() or "the launcher refused") from error


def to_wire(role: Role, bounds: PoolRange, numbers: PoolNumbers) -> control_pb2.PoolStatus:
    """Encodes what is known of a pool."""
    return control_pb2.PoolStatus(
        role=role,
        range=control_pb2.PoolRange(least=bounds.least, most=bounds.most),
        num_serving=numbers.num_serving,
        num_starting=numbers.num_starting,
        num_draining=numbers.num_draining,
        need=numbers.need,
        survivors_need=numbers.survivors_need,
        offered=numbers.offered,
        backlog_tokens=numbers.backlog_tokens,
        backlog_s=numbers.backlog_s,
        oldest_s=numbers.oldest_s,
        num_sequences=numbers.num_sequences,
        kv_share=numbers.kv_share,
        tpot_s=numbers.tpot_s,
        why=numbers.why,
        law=describe_law(numbers),
    )


def _role_of(text: str) -> Role:
    if text not in POOLS:
        raise ConfigError(f"ROLE must be one of {', '.join(POOLS)}, got {text[:64]!r}")
    return Role(text)


def _from_wire(bounds: control_pb2.PoolRange) -> PoolRange:
    return PoolRange(least=bounds.least, most=bounds.most)
