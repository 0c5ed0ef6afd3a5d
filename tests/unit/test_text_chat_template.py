from __future__ import annotations

import json
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

from compute_node.text.chat_template import ChatTemplate
from tierd.errors import UsageError

CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- endif %}"""
HELLO = [{"role": "user", "content": "Hello"}]


def store(**files):
    names = {"config": "tokenizer_config.json", "template": "chat_template.jinja"}
    contents = {
        names[key]: value if isinstance(value, bytes) else json.dumps(value).encode() for key, value in files.items()
    }
    return SimpleNamespace(
        manifest=SimpleNamespace(files=[SimpleNamespace(name=name) for name in contents]),
        read_file=contents.__getitem__,
    )


def test_a_conversation_is_rendered_as_the_template_says():
    template = ChatTemplate(CHATML, {})
    assert template.render(HELLO) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(HELLO, add_generation_prompt=False) == "<|im_start|>user\nHello<|im_end|>\n"


def test_special_tokens_are_known_by_name():
    config = {"chat_template": "{{ bos_token }}{{ eos_token }}", "bos_token": "<s>", "eos_token": {"content": "</s>"}}
    assert ChatTemplate.from_store(store(config=config)).render(HELLO) == "<s></s>"


def test_the_template_file_goes_before_the_config():
    opened = ChatTemplate.from_store(store(config={"chat_template": "old"}, template=b"new"))
    assert opened.render(HELLO) == "new"


def test_the_default_of_several_templates_is_used():
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert ChatTemplate.from_store(store(config={"chat_template": named})).render(HELLO) == "plain"


def test_a_store_without_a_template_has_none():
    assert ChatTemplate.from_store(store()) is None
    assert ChatTemplate.from_store(store(config={"bos_token": "<s>"})) is None


def test_a_refusal_of_the_template_is_passed_on():
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(UsageError, match="roles must alternate"):
        template.render(HELLO)


def test_the_clock_is_the_one_given():
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, now=lambda: datetime(2026, 2, 3, tzinfo=UTC))
    assert template.render(HELLO) == "03 Feb 2026"


def test_json_is_not_escaped_for_html():
    assert ChatTemplate("{{ messages[0]['content'] | tojson }}", {}).render([{"content": "<é>"}]) == '"<é>"'


def test_loops_can_be_left():
    template = ChatTemplate("{% for i in range(9) %}{{ i }}{% if i == 2 %}{% break %}{% endif %}{% endfor %}", {})
    assert template.render(HELLO) == "012"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[5]['content'] }}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ 1 // 0 }}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{{ 'x'.encode('rot13') }}",
        "{{ 'x' | truncate(-5) }}",
    ],
)
def test_templates_that_misbehave_give_a_clear_error(source):
    with pytest.raises(UsageError, match="the chat template"):
        ChatTemplate(source, {}).render(HELLO)


def test_a_template_that_does_not_compile_is_refused():
    with pytest.raises(UsageError, match="does not compile"):
        ChatTemplate("{% for %}", {})
    with pytest.raises(UsageError, match="does not compile"):
        ChatTemplate("{% break %}", {})


@pytest.mark.parametrize("content", [b"{", b"[]", b"[" * 100_000])
def test_a_broken_tokenizer_config_is_refused(content):
    with pytest.raises(UsageError, match=r"tokenizer_config\.json"):
        ChatTemplate.from_store(store(config=content))
