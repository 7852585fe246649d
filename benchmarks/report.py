"""Where figures come from and where they go: machine, versions, date, floors, rows."""

import json
import platform
import shutil
import subprocess
import time
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Literal

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("torch", "transformers", "grpcio", "protobuf", "uvloop", "tokenizers", "numpy")

_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")
"""Without the last two bfloat16 products are emulated, by both sides of a comparison."""


@dataclass(kw_only=True, slots=True)
class Row:
    """One figure, what it is held to, and what it was made of."""

    name: str
    value: float
    unit: str
    bound: float | None = None
    """What the project promises; None for a figure that is only shown."""
    better: Literal["higher", "lower"] = "lower"
    details: dict[str, object] = field(default_factory=dict)

    @property
    def holds(self) -> bool | None:
        """Says whether the promise was kept."""
        if self.bound is None:
            return None
        return self.value <= self.bound if self.better == "lower" else self.value >= self.bound


def write_gpu(name: str, path: Path, doc: str | None, started_s: float, **parts: object) -> None:
    """Writes what a benchmark of GPUs has found so far; a run may be ended by a time limit.

    Args:
        name: of the benchmark.
        path: of the file.
        doc: of its module; the third paragraph tells the load.
        started_s: on `time.perf_counter`.
        parts: `rows` and whatever else there is.
    """
    report = {
        "benchmark": name,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": gpu_names(),
        "versions": versions(),
        "seconds": time.perf_counter() - started_s,
        "workload": (doc or "").split("\n\n")[2],
        **parts,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def gpu_names() -> list[str]:
    """Names the GPUs of this machine."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    return answer.stdout.split("\n")[:-1]


def write(name: str, workload: str, rows: list[Row]) -> Path:
    """Prints the rows and writes `results/<name>.json`."""
    report = {
        "benchmark": name,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
        "versions": versions(),
        "workload": workload,
        "rows": [{**asdict(row), "holds": row.holds} for row in rows],
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    for row in rows:
        show(row)
    print(f"written: {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
    return path


def show(row: Row) -> None:
    """Prints one row."""
    sign = "<=" if row.better == "lower" else ">="
    promise = "" if row.bound is None else f"   ({sign} {row.bound:g}: {row.holds})"
    print(f"{row.name:<60} {row.value:>10.4g} {row.unit}{promise}", flush=True)


def machine() -> dict[str, object]:
    """Describes this machine and how busy it is: a figure taken under load is no figure."""
    facts = _key_values(Path("/proc/cpuinfo"))
    memory = _key_values(Path("/proc/meminfo")).get("MemTotal", "0 kB")
    return {
        "cpu": facts.get("model name", platform.processor()),
        "cores": sum(
            line.startswith("processor") for line in Path("/proc/cpuinfo").read_text().splitlines()
        ),
        "matrix_flags": [flag for flag in _FLAGS if flag in facts.get("flags", "").split()],
        "memory_gib": round(int(memory.split()[0]) / 2**20, 1),
        "kernel": platform.release(),
        "load_average": [float(one) for one in Path("/proc/loadavg").read_text().split()[:3]],
    }


def versions() -> dict[str, str]:
    """Returns the versions that matter."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _key_values(path: Path) -> dict[str, str]:
    pairs = (line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}
