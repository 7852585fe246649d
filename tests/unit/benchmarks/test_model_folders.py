"""What benchmarks and load tests stand on."""

import ast
from pathlib import Path

from benchmarks.serving_model import make_model_folder
from benchmarks.shapes import TINY
from pdserve.models.folder import read_model_config
from pdserve.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[3]


async def test_a_tiny_folder_holds_a_model_and_a_tokenizer_of_as_many_tokens(
    tmp_path: Path,
) -> None:
    folder = make_model_folder(tmp_path / "model", TINY)
    config = read_model_config(folder)
    tokenizer = Tokenizer.load(folder)
    assert config.vocab_size == len(tokenizer.table.token_bytes) == 384
    assert config.eos_token_ids == (383,)
    ids = await tokenizer.encode("one question")
    assert ids
    assert max(ids) < 384


def test_neither_benchmarks_nor_load_tests_import_tests() -> None:
    for folder in ("benchmarks", "loadtests"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom):
                    names = [node.module or ""]
                assert not [name for name in names if name.partition(".")[0] == "tests"], path
