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


@pytest.mark.parametrize("style", STYLES)
def test_text_around_what_only_looks_like_a_call_keeps_its_spaces(style):
    template, call = STYLES[style]
    text = f"a {call[: call.index('>') + 1]} {{{{ b {call[call.rindex('<') :]} c"
    assert read(AnswerForm.of_template(template).parser("", TOOLS), text, range(len(text))) == ("", text, [])


def json_call(city, days):
    return json.dumps({"city": city, "days": days}, ensure_ascii=False)


# The call of each style with other words, and whether values are written as JSON.
WRITTEN = {
    "hermes": lambda city, days: (
        f'<tool_call>\n{{"name": "get_weather", "arguments": {json_call(city, days)}}}\n</tool_call>'
    ),
    "kimi": lambda city, days: STYLES["kimi"][1].replace(json_call(*CALL[1].values()), json_call(city, days)),
    "deepseek": lambda city, days: V3.replace(json_call(*CALL[1].values()), json_call(city, days)),
    "deepseek-v3.1": lambda city, days: V31.replace(json_call(*CALL[1].values()), json_call(city, days)),
} | {
    style: lambda city, days, style=style: (
        STYLES[style][1].replace("Kyōto 1", city).replace("3<", f"{days}<").replace("3\n<", f"{days}\n<")
    )
    for style in ("qwen3-coder", "glm", "minimax", "dsml-v3.2", "dsml-v4")
}

words = st.text(alphabet=st.sampled_from('ab "\\{}[]<=é京🙂'), max_size=12).map(lambda text: f"x{text}y")


@given(
    style=st.sampled_from(sorted(WRITTEN)),
    parts=st.lists(st.one_of(words, st.tuples(words, st.integers(-99, 9999))), max_size=4),
    cuts=st.one_of(st.none(), st.lists(st.integers(0, 400), max_size=8)),
)
def test_text_and_calls_in_any_order_come_through_any_stream(style, parts, cuts):
    text = " ".join(part if isinstance(part, str) else WRITTEN[style](*part) for part in parts)
    found = read(
        AnswerForm.of_template(STYLES[style][0]).parser("", TOOLS),
        text,
        range(len(text)) if cuts is None else [min(cut, len(text)) for cut in cuts],
    )
    calls = [("get_weather", {"city": part[0], "days": part[1]}) for part in parts if not isinstance(part, str)]
    spoken = [part for part in parts if isinstance(part, str)]
    assert found[2] == calls
    assert "".join(found[1].split()) == "".join("".join(spoken).split())


QWEN = AnswerForm.of_template(STYLES["qwen3-coder"][0])
BARE = STYLES["qwen3-coder"][1].removeprefix("<tool_call>\n")


@pytest.mark.parametrize("end", ["", "\n", "\n</tool_call>", "\n</tool_call>\nDone </tool_call>."])
def test_a_call_whose_opening_marker_was_forgotten_is_read(end):
    text = f"Let me see.\n\n{BARE.removesuffix('</tool_call>').strip()}{end}"
    said = "Let me see.Done </tool_call>." if "Done" in end else "Let me see."
    for cut in range(len(text)):
        assert read(QWEN.parser("", TOOLS), text, [cut]) == ("", said, [CALL]), cut
    assert read(QWEN.parser("", TOOLS), text, range(len(text))) == ("", said, [CALL])


def test_what_looks_like_a_call_of_no_tool_is_content():
    for text in (
        "Write <function=NAME> first.",
        f"See: {BARE.replace('get_weather', 'other')} there",
        "a <function=stop",
    ):
        assert read(QWEN.parser("", TOOLS), text, range(len(text))) == ("", text, [])
        assert read(QWEN.parser("", {}), text, range(len(text))) == ("", text, [])


MISTRAL = AnswerForm.of_template("[TOOL_CALLS] [INST]")


@pytest.mark.parametrize(
    "call",
    [
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Kyōto 1", "days": 3}}]',
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Kyōto 1", "days": 3}, "id": "abcdef123"}]',
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Kyōto 1", "days": 3}',
        '[TOOL_CALLS]get_weather[CALL_ID]abcdef123[ARGS]{"city": "Kyōto 1", "days": 3}',
        '[TOOL_CALLS]get_weather{"city": "Kyōto 1", "days": 3}',
    ],
)
def test_calls_that_nothing_closes_end_with_the_answer(call):
    for cut in range(len(call)):
        assert read(MISTRAL.parser("", TOOLS), f"Yes. {call}", [cut]) == ("", "Yes.", [CALL]), cut
    twice = f"{call[:-1]}, {call.partition('[{')[2] and '{' + call.partition('[{')[2]}" if "[{" in call else call + call
    parser = MISTRAL.parser("", TOOLS)
    pieces = [*parser.push(twice), *parser.finish()]
    assert [(piece.name, json.loads(piece.arguments)) for piece in pieces] == [CALL, CALL]
    assert all(len(piece.id) == 9 and piece.id.isalnum() for piece in pieces)
    assert ("abcdef123" in call) == (pieces[0].id == "abcdef123")


def test_a_list_of_no_calls_is_content():
    for text in ("[TOOL_CALLS] [1]", "[TOOL_CALLS] nothing", '[TOOL_CALLS] [{"name": 1}]', "[TOOL_CALLS]f[ARGS]{"):
        assert read(MISTRAL.parser("", TOOLS), text, range(len(text))) == ("", text, [])


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
            "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
            "flag": {"type": "boolean"},
            "list": {"type": "array"},
            "unit": {"enum": ["1", "2"]},
        },
    }
    values = {
        "text": "12", "maybe": "null", "either": "3", "flag": "True", "list": "[1, 2]", "unit": "1", "unknown": "7",
    }  # fmt: skip
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    parser = AnswerForm.of_template("<tool_call><function=").parser("", {"f": schema})
    ((_, arguments),) = read(parser, f"<tool_call><function=f>\n{body}</function></tool_call>")[2]
    assert arguments == values | {"maybe": None, "flag": True, "list": [1, 2]}


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
