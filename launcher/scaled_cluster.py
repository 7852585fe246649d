"""An autoscaler that sizes the pools of a cluster for as long as it runs."""

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from autoscaler.controller import Controller, Pools
from autoscaler.settings import ScalingSettings
from launcher.control import ControlServer
from launcher.local_pool import LocalCluster
from launcher.pool_figures import ClusterFigures, Watched, find_key
from pdserve.config.cluster import ClusterConfig
from pdserve.errors import ConfigError
from pdserve.predictor.predictor import Predictor
from pdserve.predictor.profile_files import read_profiles
from pdserve.timeline import MonotonicClock


class Scalable(Pools, Watched, Protocol):
    """Whoever runs replicas, and knows them and the routers."""


class Autoscaling:
    """The autoscaler of a cluster that is ready, and the door for `pdserve scale`."""

    def __init__(
        self,
        cluster: Scalable,
        settings: ScalingSettings,
        *,
        name: str,
        api_key: str | None,
        profiles: Sequence[str],
        report: Callable[[str], None],
        control_folder: Path | None,
    ) -> None:
        """Starts nothing yet.

        Args:
            cluster: whose pools to size.
            settings: ranges and targets.
            name: of the cluster.
            api_key: that the routers know; None where they ask for none.
            profiles: that the predictor starts from.
            report: takes a line for each decision.
            control_folder: where to tell of the door; None: no door.
        """
        self._cluster = cluster
        self._settings = settings
        self._name = name
        self._api_key = api_key
        self._profiles = tuple(profiles)
        self._report = report
        self._folder = control_folder
        self._stopped = threading.Event()
        self._stack = ExitStack()
        self._controller: Controller | None = None

    @property
    def controller(self) -> Controller:
        """While it runs."""
        assert self._controller is not None, "enter first"
        return self._controller

    def __enter__(self) -> Self:
        predictor = Predictor(read_profiles(self._profiles))
        figures = self._stack.enter_context(ClusterFigures(self._cluster, self._api_key))
        self._controller = Controller(
            self._settings,
            figures,
            self._cluster,
            MonotonicClock(),
            predictor=predictor,
            report=self._report,
        )
        thread = threading.Thread(
            target=self._controller.run, args=(self._stopped,), name="autoscaler", daemon=True
        )
        thread.start()
        self._stack.callback(thread.join)
        self._stack.callback(self._stopped.set)
        if self._folder is not None:
            try:
                control = ControlServer(
                    self._controller,
                    self._folder,
                    self._name,
                    has_prefill=self._settings.prefill.most > 0,
                )
            except (ConfigError, OSError) as error:
                # The cluster serves all the same.
                self._report(f"pdserve scale will not reach this cluster: {error}")
            else:
                self._stack.callback(control.stop)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()


def autoscale_launched(
    cluster: LocalCluster,
    config: ClusterConfig,
    settings: ScalingSettings,
    *,
    report: Callable[[str], None],
    control_folder: Path | None,
) -> Autoscaling:
    """Returns the autoscaler of a cluster that this process launches; enter it once that is ready.

    Args:
        cluster: as it was configured.
        config: of the cluster.
        settings: ranges and targets.
        report: takes a line for each decision.
        control_folder: where to tell of the door of `pdserve scale`; None: no door.
    """
    return Autoscaling(
        cluster,
        settings,
        name=cluster.name,
        api_key=find_key(config),
        profiles=config.profiles,
        report=report,
        control_folder=control_folder,
    )
