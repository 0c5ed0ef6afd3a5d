"""What clients see of answers that are slow, fail, stop early or think aloud; the engine is played from a script."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from compute_node import embedded
from compute_node.engine.sampler import Sampling
from compute_node.server import responses
from compute_node.server.app import AccessRules, make_app
from compute_node.server.guard import ApiKeys, HostNames
from compute_node.server.mailbox import EventStream, Mailbox
from compute_node.server.metrics import NodeMetrics
from compute_node.server.sampling import Defaults
from compute_node.server.service import Service
from compute_node.serving.requests import Done, EngineStats, FinishReason, QueueFull, Ticket, Token, Usage
from compute_node.text.chat_template import ChatTemplate
from compute_node.text.grammar import Grammars
from compute_node.text.parsers.choose import AnswerForm
from compute_node.text.tokenizer import Tokenizer
from tierd.errors import DaemonUnavailable, DataLoss

HELLO = [{"role": "user", "content": "hi"}]
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
TEXT = "{% for m in messages %}{{ m.content }}{% endfor %}"


class ScriptedEngine:
    """Answers every request with the same text, or as a test says."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.text = "It was fine"
        self.reason = FinishReason.STOP
        self.error = None
        self.pauses = {}
        self.refuse = None
        self.requests, self.cancelled = [], []

    def submit(self, request, sink):
        if self.refuse is not None:
            raise self.refuse
        number = len(self.requests)
        self.requests.append(request)
        asyncio.get_running_loop().create_task(self._play(request, sink, number))
        return Ticket(number, self.cancelled.append)

    async def _play(self, request, sink, number):
        tokens = self.tokenizer.encode(self.text, special_tokens=False)
        decoder = self.tokenizer.stream(continues=True)
        count = 0
        for count, token in enumerate(tokens):
            await asyncio.sleep(self.pauses.get(count, 0))
            if number in self.cancelled:
                break
            sink([Token(token, decoder.push(token), None, (), 0.1)])
        reason = FinishReason.CANCELLED if number in self.cancelled else self.reason
        usage = Usage(prompt_tokens=len(request.prompt), completion_tokens=count + 1, seconds=1.0)
        sink([Done(reason, decoder.flush(), usage, self.error)])

    def stats(self):
        zero = dict.fromkeys(EngineStats.__dataclass_fields__, 0)
        return EngineStats(**(zero | {"finished": {}}))


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer((embedded.path() / "tokenizer.json").read_bytes())


@pytest.fixture
async def api(tokenizer):
    """A client of the application over a scripted engine: `api(template)` gives both."""
    clients = []

    def make(template=TEXT):
        engine = ScriptedEngine(tokenizer)
        metrics = NodeMetrics({"version": "0"})
        metrics.watch(engine.stats)
        service = Service(
            engine=engine, mailbox=Mailbox(asyncio.get_running_loop(), metrics.finished), metrics=metrics,
            tokenizer=tokenizer, template=ChatTemplate(template, {}), form=AnswerForm.of_template(template),
            grammars=Grammars(tokenizer, 4096, frozenset({0})), names=("tiny",), context=512, vocabulary=4096,
            stop_tokens=frozenset({0}), defaults=Defaults(sampling=Sampling(), max_tokens=None, answer_seconds=60.0),
            started=0, about={},
        )  # fmt: skip
        rules = AccessRules(hosts=HostNames([], loopback=True), keys=ApiKeys([]))
        transport = httpx.ASGITransport(make_app(service, rules), raise_app_exceptions=False)
        client = httpx.AsyncClient(transport=transport, base_url="http://localhost")
        clients.append(client)
        return client, engine

    yield make
    for client in clients:
        await client.aclose()


async def chat(client, **fields):
    return await client.post("/v1/chat/completions", json={"messages": HELLO, **fields})


def events(answer):
    """The JSON events of a stream; comments and the end are left out."""
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def test_a_stream_that_is_silent_says_that_it_lives(api, monkeypatch):
    client, engine = api()
    monkeypatch.setattr(responses.AnswerResponse.__init__, "__kwdefaults__", {"pulse_seconds": 0.02})
    engine.pauses = {0: 0.2, 2: 0.2}
    answer = await chat(client, stream=True)
    assert answer.text.count(": still here\n\n") >= 2
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events(answer)) == "It was fine"
    message = await client.post(
        "/v1/messages", json={"model": "tiny", "max_tokens": 9, "messages": HELLO, "stream": True}
    )
    assert message.text.count("event: ping") >= 2


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [(DaemonUnavailable("gone"), 503, "daemon_unavailable"), (DataLoss("lost", path="x"), 500, "DataLoss")],
)
async def test_what_fails_before_the_first_token_has_a_status(api, error, status, code):
    client, engine = api()
    engine.text, engine.reason, engine.error = "", FinishReason.ERROR, error
    for stream in (False, True):
        answer = await chat(client, stream=stream)
        assert answer.status_code == status
        assert answer.json()["error"]["code"] == code
    answer = await client.post("/v1/messages", json={"model": "tiny", "max_tokens": 9, "messages": HELLO})
    assert (answer.status_code, answer.json()["type"]) == (status, "error")


async def test_what_fails_in_the_middle_of_a_stream_is_an_event(api):
    client, engine = api()
    engine.reason, engine.error, engine.pauses = FinishReason.ERROR, DataLoss("lost", path="x"), {2: 0.05}
    answer = await chat(client, stream=True)
    assert answer.status_code == 200
    assert events(answer)[-1]["error"]["message"] == "lost"
    assert answer.text.endswith("data: [DONE]\n\n")
    assert not any(e.get("choices") and e["choices"][0]["finish_reason"] for e in events(answer))


async def test_an_answer_that_takes_too_long_and_a_server_that_stops_are_told(api):
    client, engine = api()
    engine.reason = FinishReason.DEADLINE
    assert (await chat(client)).status_code == 504
    engine.reason = FinishReason.CANCELLED
    answer = await chat(client)
    assert answer.status_code == 503
    assert answer.headers["retry-after"]


async def test_a_full_queue_is_told_with_the_time_to_come_back(api):
    client, engine = api()
    engine.refuse = QueueFull("9 requests wait", retry_after_seconds=2.2)
    answer = await chat(client, stream=True)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")


async def test_a_defect_is_an_error_like_any_other(api, capsys):
    client, engine = api()
    engine.refuse = ZeroDivisionError("oh")
    answer = await chat(client)
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "unexpected ZeroDivisionError; this is a defect"
    assert "ZeroDivisionError" in capsys.readouterr().err


TOOLED = f"{TEXT}{{# <tool_call> </think> #}}"
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'


async def test_thoughts_and_calls_are_told_apart_in_both_apis(api):
    client, engine = api(TOOLED)
    engine.text = f"<think>Where?</think>Let me see.{CALL}{CALL}"
    whole = (await chat(client, tools=[WEATHER])).json()["choices"][0]
    assert whole["message"]["reasoning_content"] == "Where?"
    assert whole["message"]["content"] == "Let me see."
    assert [json.loads(c["function"]["arguments"]) for c in whole["message"]["tool_calls"]] == [{"city": "Oslo"}] * 2
    assert whole["finish_reason"] == "tool_calls"
    deltas = [e["choices"][0]["delta"] for e in events(await chat(client, tools=[WEATHER], stream=True))]
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "Where?"
    assert "".join(d.get("content", "") for d in deltas) == "Let me see."
    assert [d["tool_calls"][0]["index"] for d in deltas if "tool_calls" in d] == [0, 1]
    body = {
        "model": "tiny",
        "max_tokens": 99,
        "messages": HELLO,
        "tools": [{"name": "get_weather", "input_schema": {}}],
    }
    message = (await client.post("/v1/messages", json=body)).json()
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert message["stop_reason"] == "tool_use"
    streamed = (await client.post("/v1/messages", json=body | {"stream": True})).text
    assert streamed.count("event: content_block_start") == streamed.count("event: content_block_stop") == 4
    assert streamed.index("thinking_delta") < streamed.index("text_delta") < streamed.index("input_json_delta")


async def test_one_call_at_a_time_ends_the_answer_after_the_first(api):
    client, engine = api(TOOLED)
    engine.text = f"{CALL}{CALL} and on and on and on"
    engine.pauses = dict.fromkeys(range(200), 0.001)
    whole = (await chat(client, tools=[WEATHER], parallel_tool_calls=False)).json()["choices"][0]
    assert len(whole["message"]["tool_calls"]) == 1
    assert whole["finish_reason"] == "tool_calls"
    assert engine.cancelled


async def test_results_of_tools_reach_the_template(api):
    called = "{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments.city }}{% endif %}"
    source = f"{{% for m in messages %}}[{{{{ m.role }}}}|{{{{ m.content }}}}|{called}]{{% endfor %}}"
    client, engine = api(source)
    turns = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]},
        {"role": "developer", "content": "be brief"},
    ]  # fmt: skip
    await client.post("/v1/chat/completions", json={"messages": turns})
    shown = engine.tokenizer.decode(list(engine.requests[-1].prompt))
    assert shown == "[user|hi|][assistant||Oslo][tool|rain|][system|be brief|]"
    blocks = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [
            {"type": "tool_use", "id": "c1", "name": "get_weather", "input": {"city": "Oslo"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": "rain"}, {"type": "text", "text": "so?"}]},
    ]  # fmt: skip
    await client.post("/v1/messages", json={"model": "tiny", "max_tokens": 5, "messages": blocks, "system": "be brief"})
    shown = engine.tokenizer.decode(list(engine.requests[-1].prompt))
    assert shown == "[system|be brief|][user|hi|][assistant||Oslo][tool|rain|][user|so?|]"


async def test_templates_get_arguments_thoughts_and_switches_in_their_own_words(api):
    source = (
        "{% for m in messages %}{{ m.thinking }}|{% for c in m.tool_calls or [] %}"
        "{{ 'call ' + c.function.arguments }}{% endfor %}{% endfor %}{{ enable_thinking }}{{ thinking }}"
    )
    client, engine = api(source)
    call = {"type": "tool_use", "id": "c1", "name": "get_weather", "input": {"city": "Oslo"}}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    turns = [*HELLO, {"role": "assistant", "content": [thought, call]}]
    body = {"model": "tiny", "max_tokens": 5, "messages": turns, "thinking": {"type": "disabled"}}
    assert (await client.post("/v1/messages", json=body)).status_code == 200
    shown = engine.tokenizer.decode(list(engine.requests[-1].prompt))
    assert shown == '|Hm.|call {"city": "Oslo"}FalseFalse'


async def test_stop_strings_are_looked_for_in_content_where_markers_are_special_tokens(api, tokenizer, monkeypatch):
    client, engine = api(f"{TEXT}{{# <|channel|> #}}")
    marks = {"<|user|>": "<|channel|>", "<|assistant|>": "<|message|>"}
    ids = {tokenizer.token_id(ours) for ours in marks}
    monkeypatch.setattr(tokenizer, "special_among", lambda texts: frozenset(ids if "<|channel|>" in texts else ()))
    plain = tokenizer.bytes_of
    renamed = {tokenizer.token_id(ours): theirs.encode() for ours, theirs in marks.items()}
    monkeypatch.setattr(tokenizer, "bytes_of", lambda token: renamed.get(token) or plain(token))
    engine.text = (
        "<|user|>analysis<|assistant|>stop here?<|end|><|start|>assistant<|user|>final<|assistant|>go on. stop here"
    )
    engine.pauses = dict.fromkeys(range(99), 0.001)
    for stream in (False, True):
        answer = await chat(client, stop="stop", stream=stream)
        deltas = (
            [e["choices"][0]["delta"] for e in events(answer)] if stream else [answer.json()["choices"][0]["message"]]
        )
        assert "".join(d.get("content") or "" for d in deltas) == "go on. "
        assert "".join(d.get("reasoning_content", "") for d in deltas) == "stop here?"
    assert engine.requests[-1].params.stop == ()
    message = await client.post(
        "/v1/messages", json={"model": "tiny", "max_tokens": 99, "messages": HELLO, "stop_sequences": ["x", "stop"]}
    )
    assert message.json()["stop_sequence"] == "stop"


async def test_fields_become_parameters_and_the_rest_is_the_operators(api):
    client, engine = api()
    await chat(client, temperature=0.5, top_p=0, top_k=-1, seed=-1, n=2, max_completion_tokens=7, min_tokens=2)
    first, second = (request.params for request in engine.requests)
    assert (first.max_tokens, first.min_tokens, first.sampling.top_k) == (7, 2, 0)
    assert first.sampling.top_p > 0
    assert (first.sampling.seed, second.sampling.seed) == ((1 << 64) - 1, 0)
    await chat(client)
    assert engine.requests[-1].params.max_tokens == 512 - len(engine.requests[-1].prompt)
    await client.post("/v1/completions", json={"prompt": "It"})
    assert engine.requests[-1].params.max_tokens == 16
    assert engine.requests[-1].deadline_seconds == 60.0


@pytest.mark.parametrize("known", [True, False])
async def test_a_constraint_waits_for_the_end_of_thoughts_that_the_prompt_opened(api, tokenizer, monkeypatch, known):
    client, engine = api(f"{TEXT}<think>{{# </think> #}}")
    monkeypatch.setattr(tokenizer, "token_id", lambda text: 5 if known and text == "</think>" else None)
    engine.text = 'Hm.</think>{"a": 1}'
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    answer = await chat(client, response_format=form)
    message = answer.json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", '{"a": 1}')
    assert (engine.requests[-1].constraint.mask().sum() > 4000) == known


async def test_many_events_wake_the_loop_once():
    loop, told, wakes = asyncio.get_running_loop(), [], []

    class Watched:
        def call_soon_threadsafe(self, function):
            wakes.append(function)
            loop.call_soon_threadsafe(function)

    mailbox = Mailbox(Watched(), told.append)
    streams = [EventStream() for _ in range(3)]
    done = Done(FinishReason.STOP, "", Usage(prompt_tokens=1))
    streams[2].close()
    for stream in streams:
        mailbox.post(stream, 0, [Token(1, "a", None, (), 0.0), done])
    assert len(wakes) == 1
    assert len(await streams[0].next(5)) == 2
    assert len(await streams[1].next(5)) == 2
    assert await streams[2].next(5) == []
    assert told == [done] * 3
    assert await streams[0].next(0.01) == []
    mailbox.post(streams[0], 1, [done])
    assert len(wakes) == 2
    assert await streams[0].next(5) == [(1, done)]
