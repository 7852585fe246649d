"""The Dockerfile, read: nothing here can build it."""

import re
import tomllib

from tests.support.manifests import DEPLOY, ROOT, pods

TEXT = (DEPLOY / "image" / "Dockerfile").read_text("utf-8")
LINES = [line for line in TEXT.replace("\\\n", " ").splitlines() if line and line[0] != "#"]
PACKAGES = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["build"][
    "targets"
]["wheel"]["packages"]


IGNORED = {
    line
    for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    if line and line[0] != "#"
}


def test_everything_that_the_wheel_needs_passes_the_ignore_file() -> None:
    assert "COPY . ." in LINES
    assert not IGNORED & {*PACKAGES, "pyproject.toml", "README.md", "LICENSE", "deploy"}
    assert not any(line.startswith("!") for line in IGNORED)


def test_what_is_large_or_private_does_not_get_into_the_build() -> None:
    assert {".git", ".venv", "tests", "benchmarks"} <= IGNORED


def test_the_files_that_are_copied_by_name_exist() -> None:
    copies = [line.split()[1:-1] for line in LINES if line.startswith("COPY deploy")]
    assert copies
    assert all((ROOT / name).is_file() for names in copies for name in names)


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
