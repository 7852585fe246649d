"""Writes the list of modules in docs/architecture.md from their docstrings; `--check` compares."""

import argparse
import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- rooms: made by `make rooms` -->", "<!-- end of rooms -->"
PACKAGES = (
    "launcher",
    "simulation",
    "autoscaler",
    "router",
    "prefill_worker",
    "decode_worker",
    "kv_transfer",
    "pdserve",
)


def list_rooms() -> str:
    lines: list[str] = []
    for package in PACKAGES:
        for folder in sorted({path.parent for path in (ROOT / package).rglob("*.py")}):
            name = folder.relative_to(ROOT).as_posix()
            if name == "pdserve/rpc/v1":
                continue
            lines += ["", f"**{name}/** {summary_of(folder / '__init__.py')}", ""]
            lines += [
                f"- `{path.stem}`: {summary_of(path)}"
                for path in sorted(folder.glob("*.py"))
                if path.stem != "__init__"
            ]
    return "\n".join(lines[1:])


def summary_of(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.split("\n\n")[0].split())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    is_check = parser.parse_args().check
    text = DOCUMENT.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    fresh = f"{head}{BEGIN}\n\n{list_rooms()}\n\n{END}{tail}"
    if is_check and fresh != text:
        print("docs/architecture.md does not list the modules as they are: run `make rooms`")
        return 1
    if not is_check:
        DOCUMENT.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
