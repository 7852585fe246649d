import pytest

from pdserve.errors import ConfigError
from pdserve.tokenizer import Tokenizer, read_tokenizer_config
from tests.support.text_models import byte_level_tokenizer, make_text_model


async def test_ids_equal_the_librarys_own(tmp_path):
    tokenizer = Tokenizer.load(make_text_model(tmp_path))
    text = "<|im_start|>the größer 東京"
    ids = await tokenizer.encode(text)
    assert list(ids) == byte_level_tokenizer().encode(text).ids
    assert await tokenizer.decode(ids) == "the größer 東京"
    assert ids[0] == 1


def test_the_longest_token_bounds_what_a_text_can_hold(tmp_path):
    tokenizer = Tokenizer.load(make_text_model(tmp_path))
    assert tokenizer.max_token_characters == len("<|endoftext|>")


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"model": {}}', "no json"])
def test_a_broken_tokenizer_is_one_clear_error(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match=r"is no tokenizer"):
        Tokenizer.load(tmp_path)


def test_a_broken_tokenizer_config_is_named(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match="no JSON"):
        read_tokenizer_config(tmp_path)
