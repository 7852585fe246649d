"""What is shipped: the folders, the version, the direction of imports."""

import ast
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from pdserve.version import VERSION

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES: list[str] = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
FORBIDDEN = {
    "pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve",
    "multiprocessing", "torch.multiprocessing", "xmlrpc",
}  # fmt: skip


def test_every_package_that_is_named_exists() -> None:
    # hatchling drops a misspelt entry without a word.
    assert all((ROOT / name / "__init__.py").is_file() for name in PACKAGES)


def test_a_built_wheel_holds_these_packages_and_nothing_else(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    top_level = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert top_level == set(PACKAGES)
    assert "pdserve/rpc/v1/inference_pb2.py" in names


def test_every_package_that_exists_is_named() -> None:
    found = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert found - {"tests", "benchmarks", "loadtests"} == set(PACKAGES)


def test_version_is_the_same_everywhere() -> None:
    assert PROJECT["project"]["version"] == VERSION


def test_no_package_is_called_proto() -> None:
    assert not (ROOT / "proto" / "__init__.py").exists()


@pytest.mark.parametrize("name", ["launcher.cli", "launcher.commands.generate"])
def test_command_line_loads_no_torch(name: str) -> None:
    code = f"import sys, {name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_E1_no_package_imports_what_runs_code_from_bytes() -> None:
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert len(paths) > 100
    for path in paths:
        for name in imports_of(path):
            heads = {name, *(name[:end] for end, mark in enumerate(name) if mark == ".")}
            assert not heads & FORBIDDEN, f"{path} imports {name}"


def test_E1_no_package_calls_a_loader_that_runs_code() -> None:
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call):
                    called = ast.unparse(node.func)
                    assert called not in ("eval", "exec", "torch.load", "yaml.load"), path
