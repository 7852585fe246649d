"""Generates the stubs under pdserve/rpc/v1 from proto/; `--check` only compares."""

import argparse
import filecmp
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
STUBS = Path("pdserve/rpc/v1")


def generate(out: Path) -> None:
    sources = sorted(str(path) for path in (PROTO / STUBS).glob("*.proto"))
    flags = ("--python_out", "--grpc_python_out", "--mypy_out", "--mypy_grpc_out")
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"-I{PROTO}",
        *(f"{flag}={out}" for flag in flags),
    ]
    environment_path = str(Path(sys.executable).parent)
    subprocess.run(
        [*command, *sources], check=True, env={"PATH": f"{environment_path}:/usr/bin:/bin"}
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="fail when the committed stubs are stale"
    )
    if not parser.parse_args().check:
        generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = sorted(path.name for path in (Path(folder) / STUBS).iterdir())
        stale = filecmp.cmpfiles(Path(folder) / STUBS, ROOT / STUBS, fresh, shallow=False)
    if stale[1] or stale[2]:
        print(f"stale stubs, run `make stubs`: {stale[1] + stale[2]}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
