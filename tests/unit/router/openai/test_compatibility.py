import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from pdserve.detokenizer import TokenTable
from router.openai.chat import parse_chat
from router.openai.compatibility import SUPPORTED, UnknownFields
from router.openai.completions import parse_completion
from router.openai.fields import Fields
from router.openai.logprobs import TokenTexts

ROOT = Path(__file__).resolve().parents[4]
TEXTS = TokenTexts(TokenTable(token_bytes=(b"a",), special_ids=frozenset()))
PROMPTS = {
    "/v1/chat/completions": ("messages", [{"role": "user", "content": "hi"}]),
    "/v1/completions": ("prompt", "hi"),
}


@pytest.mark.parametrize("path", SUPPORTED)
def test_supported_fields_are_those_that_are_read(path: str) -> None:
    parse = parse_chat if "chat" in path else parse_completion
    fields = Fields(dict([PROMPTS[path]]))
    parse(fields, TEXTS, UnknownFields())
    assert fields.asked == set(SUPPORTED[path])


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("list_fields", ROOT / "scripts/list_fields.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_in_the_docs_is_fresh() -> None:
    script = _script()
    text = (ROOT / "docs/http.md").read_text(encoding="utf-8")
    assert script.BEGIN + script.field_table() + script.END in text
