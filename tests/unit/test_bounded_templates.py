"""Templates of a hostile model: they reach nothing, and neither time nor memory runs away."""

from __future__ import annotations

import pytest

from compute_node.text import bounded_jinja
from compute_node.text.chat_template import ChatTemplate
from tierd.errors import UsageError

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{% set x = namespace(t='ab') %}{% for i in range(60) %}{% set x.t = x.t + x.t %}{% endfor %}",
        "{% set x = namespace(t='ab') %}{% for i in range(60) %}{% set x.t = x.t ~ x.t %}{% endfor %}",
        "{% set x = namespace(t='ab') %}{% for i in range(60) %}{% set x.t = x.t.replace('a', 'aa') %}{% endfor %}",
        "{% set x = namespace(t=[1]) %}{% for i in range(60) %}{% set x.t = x.t + x.t %}{% endfor %}",
        "{{ 'a' * 999999999 }}",
        "{{ [1] * 999999999 }}",
        "{{ 9 ** 999999999 }}",
        "{{ 'a'.ljust(999999999) }}",
        "{{ 'a' | center(999999999) }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 999999999) }}",
        "{% for i in range(99999) %}{{ messages[0].content * 999 }}{% endfor %}",
        "{% set t = 'a' * 99999 %}{% for i in range(9999) %}{% set s = t ~ t %}{% endfor %}",
        "{% set t = 'a' * 99999 %}{% for i in range(9999) %}{% if t.upper() %}{% endif %}{% endfor %}",
        "{{ messages | tojson(indent=99999) }}",
        "{{ messages | tojson(indent='a' * 99999) }}",
        "{{ messages | tojson(separators=('a' * 99999, 'b')) }}",
    ],
)
def test_loops_and_texts_are_bounded(source, monkeypatch):
    monkeypatch.setattr(bounded_jinja, "MAX_ROUNDS", 20_000)
    monkeypatch.setattr("compute_node.text.chat_template.MAX_TEXT", 1 << 20)
    monkeypatch.setattr(bounded_jinja, "MAX_TEXT", 1 << 20)
    monkeypatch.setattr(bounded_jinja, "_MAX_COPIED", 1 << 26)
    with pytest.raises(UsageError, match="chat template"):
        ChatTemplate(source, {}).render(HELLO)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append(1) }}",
        "{% include 'x' %}",
    ],
)
def test_a_template_reaches_nothing(source):
    try:
        shown = ChatTemplate(source, {}).render(HELLO)
    except UsageError:
        return
    assert not shown.strip()


def test_rounds_are_counted_for_each_rendering(monkeypatch):
    monkeypatch.setattr(bounded_jinja, "MAX_ROUNDS", 50)
    template = ChatTemplate("{% for i in range(40) %}{% if i > 37 %}{{ i }}{% endif %}{% endfor %}", {})
    assert [template.render(HELLO) for _ in range(3)] == ["3839"] * 3


def test_what_real_templates_do_still_works():
    source = (
        "{%- macro show(m) %}{{ m.role ~ ': ' ~ m.content | trim }}{%- endmacro %}"
        "{%- for m in messages[::-1] %}{{ show(m) }}{{ '|' * 2 }}{%- endfor %}"
        "{% generation %}{{ messages | length + 1 }}{% endgeneration %}{{ 7 % 4 }}{{ '%s!' % 'x' }}"
        "{%- for t in tools %}{% if loop.first %}{{ t.name | tojson }}{% break %}{% endif %}{% endfor %}"
        "{{ enable_thinking }}"
    )
    shown = ChatTemplate(source, {}).render(HELLO, tools=[{"name": "f"}], extra={"enable_thinking": False})
    assert shown == 'user: Hello||23x!"f"False'


def test_variables_of_the_template_itself_are_not_for_callers():
    with pytest.raises(UsageError, match="messages"):
        ChatTemplate("{{ messages }}", {}).render(HELLO, extra={"messages": []})
