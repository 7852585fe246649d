"""The Dockerfile, read: nothing here can build it."""

import re
import tomllib

from tests.support.manifests import DEPLOY, ROOT, pods

TEXT = (DEPLOY / "image" / "Dockerfile").read_text("utf-8")
LINES = [line for line in TEXT.replace("\\\n", " ").splitlines() if line and line[0] != "#"]
PACKAGES = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["build"][
    "targets"
]["wheel"]["packages"]


def copied() -> list[str]:
    copies = [line.split()[1:-1] for line in LINES if line.startswith("COPY")]
    return [name for names in copies for name in names if not name.startswith(("--", "/"))]


def test_every_package_is_copied_and_everything_copied_exists() -> None:
    assert set(PACKAGES) <= set(copied())
    assert all((ROOT / name).exists() for name in copied())


def test_everything_copied_passes_the_ignore_file_and_nothing_else_does() -> None:
    ignored = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    assert ignored[0] == "*"
    passed = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    tops = {name if not name.startswith("deploy/") else "deploy/image" for name in copied()}
    assert passed == tops


def test_every_instruction_is_one_of_dockers() -> None:
    known = {"FROM", "ARG", "ENV", "RUN", "WORKDIR", "COPY", "USER", "ENTRYPOINT", "CMD"}
    assert {line.split()[0] for line in LINES} == known


def test_the_image_does_not_run_as_root_and_the_manifests_name_the_same_user() -> None:
    (user,) = [line.split()[1] for line in LINES if line.startswith("USER")]
    number = int(user.split(":")[0])
    ours = [pod for pod in pods() if pod.container["image"].startswith("pdserve:")]
    assert len(ours) >= 7
    assert {pod.spec["securityContext"]["runAsUser"] for pod in ours} == {number}


def test_the_programs_that_manifests_run_are_in_the_image() -> None:
    assert "/opt/pdserve/bin/drain_pod" in TEXT
    assert re.search(r"install .*\bbash\b.*\btini\b.*\bwget\b", TEXT.replace("\n", " "))
