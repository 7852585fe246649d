"""Fixtures of models: a tiny one for every test, and SmolLM2 where a real one matters."""

from pathlib import Path

import pytest

from launcher.model_source import resolve_model
from tests.support.tiny_models import make_tiny_llama, make_tiny_qwen2


@pytest.fixture(scope="session")
def tiny_llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny_llama"))


@pytest.fixture(scope="session")
def tiny_qwen2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen2(tmp_path_factory.mktemp("tiny_qwen2"))


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    return resolve_model("smollm2-135m")
