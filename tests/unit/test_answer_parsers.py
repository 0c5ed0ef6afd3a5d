"""Answers of every style of tool calls, however they are cut into pieces on their way."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compute_node.text.parsers.choose import AnswerForm
from compute_node.text.parsers.forced import forced_schema
from compute_node.text.parsers.pieces import Content, MoreArguments, Reasoning, ToolCall

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "units": {"enum": ["C", "F"]}},
}
TOOLS = {"get_weather": WEATHER, "stop": {"type": "object", "properties": {}}}
CALL = ("get_weather", {"city": "Kyōto 1", "days": 3})
BAR, GAP = "\uff5c", "\u2581"


def deepseek(words):
    return f"<{BAR}{words.replace(' ', GAP)}{BAR}>"


HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Kyōto 1", "days": 3}}\n</tool_call>'
V3 = (
    f"{deepseek('tool calls begin')}{deepseek('tool call begin')}function{deepseek('tool sep')}get_weather\n"
    f'```json\n{{"city": "Kyōto 1", "days": 3}}\n```{deepseek("tool call end")}{deepseek("tool calls end")}'
)
V31 = (
    f"{deepseek('tool calls begin')}{deepseek('tool call begin')}get_weather{deepseek('tool sep')}"
    f'{{"city": "Kyōto 1", "days": 3}}{deepseek("tool call end")}{deepseek("tool calls end")}'
)
DSML = f"{BAR}DSML{BAR}"


def dsml(block):
    return (
        f'<{DSML}{block}>\n<{DSML}invoke name="get_weather">\n<{DSML}parameter name="city" string="true">Kyōto 1'
        f'</{DSML}parameter>\n<{DSML}parameter name="days" string="false">3</{DSML}parameter>\n</{DSML}invoke>\n'
        f"</{DSML}{block}>"
    )


# What a template of the style contains, and one call in it.
STYLES = {
    "hermes": ("<tool_call> </think>", HERMES),
    "qwen3-coder": (
        "<tool_call> <function= </think>",
        (
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nKyōto 1\n</parameter>\n<parameter=days>\n3\n"
            "</parameter>\n</function>\n</tool_call>"
        ),
    ),
    "glm": (
        "<tool_call> <arg_key> </think>",
        (
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Kyōto 1</arg_value>\n<arg_key>days</arg_key>\n"
            "<arg_value>3</arg_value>\n</tool_call>"
        ),
    ),
    "minimax": (
        "<minimax:tool_call> </think>",
        (
            '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Kyōto 1</parameter>\n'
            '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>'
        ),
    ),
    "kimi": (
        "<|tool_calls_section_begin|> </think>",
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
            '{"city": "Kyōto 1", "days": 3}<|tool_call_end|><|tool_calls_section_end|>'
        ),
    ),
    "deepseek": (f"{deepseek('tool calls begin')} </think>", V3),
    "deepseek-v3.1": (f"{deepseek('tool calls begin')} </think>", V31),
    "dsml-v3.2": (f"{{% set dsml = '{DSML}' %}} </think>", dsml("function_calls")),
    "dsml-v4": (f"<{DSML}tool_calls> </think>", dsml("tool_calls")),
}


def read(parser, text, cuts=()):
    """All that a parser makes of a text that comes in pieces: reasoning, content, calls."""
    reasoning, content, calls = "", "", []
    places = [0, *sorted(cuts), len(text)]
    pieces = [piece for start, end in itertools.pairwise(places) for piece in parser.push(text[start:end])]
    for piece in [*pieces, *parser.finish()]:
        match piece:
            case Content(text=more):
                content += more
            case Reasoning(text=more):
                reasoning += more
            case ToolCall(name=name, arguments=arguments, id=number):
                calls.append([name, arguments, number])
            case MoreArguments(text=more):
                calls[-1][1] += more
    return reasoning, content, [(name, json.loads(arguments)) for name, arguments, _ in calls]


@pytest.mark.parametrize("style", STYLES)
def test_a_call_is_read_wherever_the_text_is_cut(style):
    template, call = STYLES[style]
    form = AnswerForm.of_template(template)
    text = f"<think>\nI should look.\n</think>\n\nLet me see. {call}"
    for cut in range(len(text)):
        found = read(form.parser("", TOOLS), text, [cut])
        assert found == ("I should look.", "Let me see.", [CALL]), cut
    assert read(form.parser("", TOOLS), text, range(len(text))) == ("I should look.", "Let me see.", [CALL])


@pytest.mark.parametrize("style", STYLES)
def test_what_a_prompt_has_opened_is_thought_until_it_is_closed(style):
    template, call = STYLES[style]
    parser = AnswerForm.of_template(template).parser("… <think>\n", TOOLS)
    assert read(parser, f"I should.</think>{call}") == ("I should.", "", [CALL])


@pytest.mark.parametrize("style", STYLES)
def test_without_tools_a_call_is_plain_text(style):
    template, call = STYLES[style]
    assert read(AnswerForm.of_template(template).parser("", {}), call) == ("", call, [])


@pytest.mark.parametrize("style", STYLES)
def test_a_call_that_the_model_did_not_close_is_read_as_far_as_it_goes(style):
    template, call = STYLES[style]
    unclosed = call[: call.rindex("<")]
    assert read(AnswerForm.of_template(template).parser("", TOOLS), unclosed)[2] == [CALL]


@pytest.mark.parametrize("style", STYLES)
def test_what_only_looks_like_a_call_is_content(style):
    template, call = STYLES[style]
    form = AnswerForm.of_template(template)
    begin, end = call[: call.index(">") + 1], call[call.rindex("<") :]
    text = f"{begin} {{{{ no call {end}"
    assert read(form.parser("", TOOLS), text) == ("", text, [])
    cut = text[: len(begin) - 2]
    assert read(form.parser("", TOOLS), f"a {cut}") == ("", f"a {cut}", [])


@pytest.mark.parametrize("style", ["hermes", "qwen3-coder", "glm"])
def test_several_calls_follow_each_other(style):
    template, call = STYLES[style]
    parser = AnswerForm.of_template(template).parser("", TOOLS)
    assert read(parser, f"{call}\n{call}\n") == ("", "", [CALL, CALL])


def test_parameters_without_quotes_are_read_as_their_schema_says():
    schema = {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "flag": {"type": "boolean"},
            "list": {"type": "array"},
            "unit": {"enum": ["1", "2"]},
        },
    }
    values = {"text": "12", "maybe": "null", "flag": "True", "list": "[1, 2]", "unit": "1", "unknown": "7"}
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    parser = AnswerForm.of_template("<tool_call><function=").parser("", {"f": schema})
    ((_, arguments),) = read(parser, f"<tool_call><function=f>\n{body}</function></tool_call>")[2]
    assert arguments == {"text": "12", "maybe": None, "flag": True, "list": [1, 2], "unit": "1", "unknown": "7"}


def test_kimis_own_names_of_calls_are_kept():
    template, call = STYLES["kimi"]
    (piece,) = AnswerForm.of_template(template).parser("", TOOLS).push(call)
    assert piece.id == "functions.get_weather:0"


HARMONY = AnswerForm.of_template("<|start|> <|channel|>")


def test_messages_on_channels_are_told_apart_wherever_the_text_is_cut():
    text = (
        "<|channel|>analysis<|message|>The user < asks.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city": "Kyōto 1", "days": 3}<|call|>'
    )
    for cut in range(len(text)):
        assert read(HARMONY.parser("", TOOLS), text, [cut]) == ("The user < asks.", "", [CALL]), cut
    final = (
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>It is 1 < 2.<|return|>"
    )
    assert read(HARMONY.parser("", TOOLS), final, range(len(final))) == ("Easy.", "It is 1 < 2.", [])
    assert read(HARMONY.parser("", {}), text)[1:] == ('{"city": "Kyōto 1", "days": 3}', [])


def test_a_message_that_was_cut_off_is_shown():
    assert read(HARMONY.parser("", {}), "<|channel|>final<|message|>It is") == ("", "It is", [])
    assert read(HARMONY.parser("", {}), "plain words") == ("", "plain words", [])


def test_a_forced_call_comes_as_it_is_written():
    form = AnswerForm.of_template("</think>")
    text = '{"name": "get_weather", "arguments": {"city": "Kyōto 1", "days": 3}}'
    for cut in range(len(text)):
        assert read(form.parser("", TOOLS, forced=True), text, [cut]) == ("", "", [CALL]), cut
    only = {"get_weather": WEATHER}
    parser = form.parser("<think>", only, forced=True)
    assert read(parser, 'Hm.</think>{"city": "Kyōto 1", "days": 3}', range(40)) == ("Hm.", "", [CALL])
    assert forced_schema(only) == WEATHER
    assert [branch["properties"]["name"] for branch in forced_schema(TOOLS)["anyOf"]] == [
        {"const": "get_weather"}, {"const": "stop"},
    ]  # fmt: skip


def test_constrained_content_is_not_searched_for_tags():
    form = AnswerForm.of_template("<tool_call> </think>")
    text = '{"a": "<think> <tool_call>"}'
    assert read(form.parser("", {}, constrained=True), text, range(len(text))) == ("", text, [])
    assert read(form.parser("<think>", {}, constrained=True), f"x</think>{text}", range(10)) == ("x", text, [])


def test_thoughts_come_first_or_not_at_all():
    form = AnswerForm.of_template("</think>")
    text = "It is written <think> in tags </think>."
    assert read(form.parser("", {}), text, range(len(text))) == ("", text, [])


@given(st.text(alphabet='ab <>/tool_call\n{}"', max_size=60), st.lists(st.integers(0, 60), max_size=6))
def test_text_without_markers_comes_through_as_it_is(text, cuts):
    form = AnswerForm.of_template("<tool_call>")
    if "<tool_call>" in text:
        return
    cuts = [min(cut, len(text)) for cut in cuts]
    assert read(form.parser("", TOOLS), text, cuts) == ("", text, [])
    assert read(AnswerForm.of_template("").parser("", TOOLS), text, cuts) == ("", text, [])
