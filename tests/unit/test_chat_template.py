import json

import pytest

from pdserve import chat_template
from pdserve.chat_template import ChatTemplate, Message
from pdserve.errors import ConfigError, InvalidField
from tests.support.text_models import CHAT_TEMPLATE

HELLO = [Message(role="user", content="hi")]


def _render(source: str, messages=HELLO, limit: int = 10_000) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, limit)


def test_messages_are_rendered_with_the_opening_of_an_answer():
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert _render(CHAT_TEMPLATE) == expected


def test_special_tokens_are_known_to_the_template():
    assert _render("{{ bos_token }}x{{ eos_token }}") == "<s>x</s>"


def test_the_templates_own_refusal_is_shown():
    with pytest.raises(InvalidField, match="roles must alternate"):
        _render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ missing.attribute }}",
        "{{ 1 / 0 }}",
        "{{ range(10000000) | list }}",
    ],
)
def test_E9_a_template_cannot_leave_its_sandbox(source):
    with pytest.raises(InvalidField):
        _render(source)


def test_D7_content_is_data_and_never_a_template():
    assert "{{ 7*7 }}" in _render(CHAT_TEMPLATE, [Message(role="user", content="{{ 7*7 }}")])


def test_a_text_that_grows_without_end_is_cut():
    source = "{% for i in range(90000) %}{% for j in range(90000) %}xxxx{% endfor %}{% endfor %}"
    with pytest.raises(InvalidField, match="at most 1000 characters"):
        _render(source, limit=1000)


def test_a_template_that_takes_too_long_is_stopped(monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_RENDER_S", 0.0)
    source = "{% for i in range(90000) %}x{% endfor %}"
    with pytest.raises(InvalidField, match="rendered within"):
        _render(source, limit=10**9)


def test_a_broken_template_is_an_error_of_the_model_folder():
    with pytest.raises(ConfigError, match="does not compile"):
        ChatTemplate("{% for %}", {})


@pytest.mark.parametrize(
    ("settings", "has_template"),
    [
        ({}, False),
        ({"chat_template": CHAT_TEMPLATE}, True),
        ({"chat_template": [{"name": "default", "template": CHAT_TEMPLATE}]}, True),
        ({"chat_template": CHAT_TEMPLATE, "bos_token": {"content": "<s>"}}, True),
    ],
)
def test_the_template_is_found_in_the_tokenizer_config(tmp_path, settings, has_template):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    template = ChatTemplate.load(tmp_path)
    assert (template is not None) == has_template


def test_a_template_file_comes_before_the_config(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "config"}))
    (tmp_path / "chat_template.jinja").write_text("file")
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render(HELLO, 100) == "file"
