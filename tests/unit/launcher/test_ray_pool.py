import importlib.util

import pytest

from launcher.cli import run_command
from launcher.local_pool import LocalCluster
from launcher.ray_pool import RayConfig, RayPlace, keeper_command


def test_without_ray_installed_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run_command(["serve", "x", "--launcher", "ray"]) == 2
    line = "pdserve: --launcher ray needs Ray: pip install 'pdserve[ray]'\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    "flags", [["--ray-dashboard"], ["--ray-address", "127.0.0.1:6379"], ["--ray-pools"]]
)
def test_flags_of_ray_without_ray_are_refused(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["serve", "x", *flags]) == 2
    assert "need --launcher ray" in capsys.readouterr().err


def test_pools_of_their_own_on_one_machine_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["serve", "x", "--launcher", "ray", "--ray-pools"]) == 2
    assert "--ray-pools needs --ray-nodes any" in capsys.readouterr().err


@pytest.mark.parametrize("has_dashboard", [False, True])
def test_the_dashboard_is_asked_for_only_if_the_user_asks(has_dashboard: bool) -> None:
    argv = keeper_command(RayConfig(num_cpus=4, has_dashboard=has_dashboard), channel_fd=5)
    assert argv[1:3] == ("-m", "launcher.roles.ray_keeper")
    assert ("--dashboard" in argv) is has_dashboard
    assert "--address" not in argv


def test_the_address_of_a_running_cluster_is_passed_on() -> None:
    argv = keeper_command(RayConfig(address="127.0.0.1:6379"), channel_fd=5)
    assert argv[-2:] == ("--address", "127.0.0.1:6379")


@pytest.mark.parametrize(("flags", "expected"), [([], False), (["--ray-dashboard"], True)])
def test_the_flag_of_the_dashboard_reaches_the_ray_place(
    flags: list[str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs: list[RayConfig] = []

    class Seen(RayPlace):
        def __init__(self, config: RayConfig, **rest: object) -> None:
            configs.append(config)

    def run(cluster: LocalCluster, scaled: object) -> int:
        return 0

    monkeypatch.setattr("launcher.commands.serve.RayPlace", Seen)
    monkeypatch.setattr("launcher.commands.serve.run_until_signal", run)
    assert run_command(["serve", "x", "--launcher", "ray", *flags]) == 0
    assert [config.has_dashboard for config in configs] == [expected]
