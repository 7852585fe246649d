import importlib.util

import pytest

from launcher.cli import run_command


def test_without_ray_installed_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run_command(["serve", "x", "--launcher", "ray"]) == 2
    line = "pdserve: --launcher ray needs Ray: pip install 'pdserve[ray]'\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("flags", [["--ray-dashboard"], ["--ray-address", "127.0.0.1:6379"]])
def test_flags_of_ray_without_ray_are_refused(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["serve", "x", *flags]) == 2
    assert "need --launcher ray" in capsys.readouterr().err
