"""The official clients of OpenAI and Anthropic in their usual flows, and curl, against a real server."""

from __future__ import annotations

import asyncio
import json
import subprocess

import anthropic
import httpx
import openai
import pytest
from api_server import served, tiny
from daemons import eventually

from compute_node.text.chat_template import ChatTemplate

__all__ = ["tiny"]

HELLO = [{"role": "user", "content": "It was a fine morning, and"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"days": {"enum": [1, 2, 3]}},
            "required": ["days"],
            "additionalProperties": False,
        },
    },
}
OTHER = {"type": "function", "function": {"name": "stop"}}
SMALL = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2]}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(tiny):
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="any", max_retries=0, timeout=60) as found:
        yield found


@pytest.fixture(scope="module")
def claude(tiny):
    with anthropic.Anthropic(base_url=tiny.url, api_key="any", max_retries=0, timeout=60) as found:
        yield found


@pytest.fixture(autouse=True)
def all_slots_are_free_afterwards(tiny):
    yield
    tiny.idle()


def test_models_are_listed_under_all_their_names(client):
    assert [model.id for model in client.models.list()] == ["tiny", "other-name"]
    assert client.models.retrieve("other-name").id == "other-name"
    with pytest.raises(openai.NotFoundError, match="'gpt-4' is not served here"):
        client.chat.completions.create(model="gpt-4", messages=HELLO)


def test_a_chat_is_the_same_whole_and_streamed(client):
    wanted = {"model": "tiny", "messages": HELLO, "max_tokens": 12, "seed": 7, "temperature": 0.8}
    whole = client.chat.completions.create(**wanted)
    (choice,) = whole.choices
    assert choice.finish_reason == "length"
    assert choice.message.role == "assistant"
    assert whole.usage.completion_tokens == 12
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 12
    chunks = list(client.chat.completions.create(**wanted, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == choice.message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1:] == ["length"]
    assert sum(bool(chunk.choices and chunk.choices[0].finish_reason) for chunk in chunks) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens < chunks[-1].usage.prompt_tokens
    assert len({chunk.id for chunk in chunks}) == 1
    other = client.chat.completions.create(**{**wanted, "seed": 8})
    assert other.choices[0].message.content != choice.message.content


def test_a_stream_says_how_it_went(client):
    *_, last = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=4, stream=True)
    timings = last.timings
    assert timings["time_to_first_token_seconds"] <= timings["seconds"]
    assert sum(timings["experts"].values()) > 0
    assert timings["wait_seconds"] >= 0


def test_many_limits_are_clamped_and_not_refused(client, tiny):
    whole = client.completions.create(model="tiny", prompt="It was", max_tokens=1_000_000)
    usage = whole.usage
    assert usage.prompt_tokens + usage.completion_tokens <= tiny.service.context
    assert whole.choices[0].finish_reason in {"length", "stop"}


def test_stop_strings_end_an_answer_across_tokens(client):
    text = client.completions.create(model="tiny", prompt="It was a fine", max_tokens=24).choices[0].text
    stop = text[9:14]
    cut = client.completions.create(model="tiny", prompt="It was a fine", max_tokens=24, stop=["§", stop])
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage.completion_tokens < 24
    stream = client.completions.create(model="tiny", prompt="It was a fine", max_tokens=24, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == cut.choices[0].text
    with pytest.raises(openai.BadRequestError, match="stop"):
        client.completions.create(model="tiny", prompt="It", stop=list("abcde"))


def test_prompts_may_be_token_ids_and_several(client, tiny):
    first, second = "It was a", "In the beginning"
    ids = [tiny.service.tokenizer.encode(text) for text in (first, second)]
    both = client.completions.create(model="tiny", prompt=[first, second], max_tokens=4)
    assert [choice.index for choice in both.choices] == [0, 1]
    assert both.usage.prompt_tokens == sum(map(len, ids))
    again = client.completions.create(model="tiny", prompt=ids, max_tokens=4)
    assert [choice.text for choice in again.choices] == [choice.text for choice in both.choices]
    alone = client.completions.create(model="tiny", prompt=ids[1], max_tokens=4)
    assert alone.choices[0].text == both.choices[1].text
    with pytest.raises(openai.BadRequestError, match="token ids"):
        client.completions.create(model="tiny", prompt=[1 << 20], max_tokens=1)


def test_choices_are_drawn_with_seeds_that_follow_each_other(client):
    wanted = {"model": "tiny", "messages": HELLO, "max_tokens": 6, "temperature": 1.0}
    both = client.chat.completions.create(**wanted, n=2, seed=3)
    alone = [client.chat.completions.create(**wanted, seed=seed).choices[0].message.content for seed in (3, 4)]
    assert [choice.message.content for choice in both.choices] == alone
    chunks = client.chat.completions.create(**wanted, n=2, seed=3, stream=True)
    texts = ["", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == alone


def test_log_probabilities_of_a_chat(client):
    wanted = {"model": "tiny", "messages": HELLO, "max_tokens": 5, "logprobs": True, "top_logprobs": 3}
    (choice,) = client.chat.completions.create(**wanted).choices
    entries = choice.logprobs.content
    assert "".join(entry.token for entry in entries) == choice.message.content
    assert all(bytes(entry.bytes).decode() == entry.token for entry in entries)
    for entry in entries:
        likely = [top.logprob for top in entry.top_logprobs]
        assert likely == sorted(likely, reverse=True)
        assert (entry.token, entry.logprob) == (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob)
        assert entry.logprob <= 0
    chunks = client.chat.completions.create(**wanted, stream=True)
    streamed = [e for c in chunks if c.choices and c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert [(e.token, e.logprob) for e in streamed] == [(e.token, e.logprob) for e in entries]


def test_echo_gives_the_prompt_and_how_likely_it_was(client):
    whole = client.completions.create(model="tiny", prompt="It was a fine", max_tokens=3, echo=True, logprobs=2)
    (choice,) = whole.choices
    found = choice.logprobs
    assert choice.text.startswith("It was a fine")
    assert "".join(found.tokens) == choice.text
    assert found.token_logprobs[0] is None
    assert all(value <= 0 for value in found.token_logprobs[1:])
    assert [choice.text[place:].startswith(token) for place, token in zip(found.text_offset, found.tokens, strict=True)]
    scored = client.completions.create(model="tiny", prompt="It was a fine", max_tokens=0, echo=True, logprobs=2)
    prompt = len(scored.choices[0].logprobs.tokens)
    assert scored.choices[0].text == "It was a fine"
    assert scored.choices[0].logprobs.token_logprobs == found.token_logprobs[:prompt]
    assert scored.usage.completion_tokens == 0
    plain = client.completions.create(model="tiny", prompt="It was", max_tokens=2, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in plain).startswith("It was")


def test_penalties_and_biases_change_the_answer(client, tiny):
    wanted = {"model": "tiny", "prompt": "the the the the the the", "max_tokens": 12, "logprobs": 0}
    plain = client.completions.create(**wanted).choices[0]
    (first,) = tiny.service.tokenizer.encode(plain.logprobs.tokens[0], special_tokens=False)
    banned = client.completions.create(**wanted, logit_bias={str(first): -100.0}).choices[0]
    assert plain.logprobs.tokens[0] not in banned.logprobs.tokens
    assert client.completions.create(**wanted, extra_body={"repetition_penalty": 50.0}).choices[0].text != plain.text
    pushed = client.completions.create(
        **wanted, presence_penalty=2.0, frequency_penalty=2.0, logit_bias={str(first): 40}
    )
    assert pushed.choices[0].logprobs.tokens[0] == plain.logprobs.tokens[0]


def test_an_answer_follows_a_json_schema(client):
    form = {"type": "json_schema", "json_schema": {"name": "small", "schema": SMALL, "strict": True}}
    wanted = {"model": "tiny", "messages": HELLO, "max_tokens": 60, "response_format": form}
    whole = client.chat.completions.create(**wanted, temperature=1.0, seed=1)
    found = json.loads(whole.choices[0].message.content)
    assert list(found) == ["ok", "n"]
    assert whole.choices[0].finish_reason == "stop"
    chunks = client.chat.completions.create(**wanted, temperature=1.0, seed=1, stream=True)
    assert json.loads("".join(c.choices[0].delta.content or "" for c in chunks if c.choices)) == found
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "http://evil.example/"}}}
    with pytest.raises(openai.BadRequestError, match="leads outside"):
        client.chat.completions.create(model="tiny", messages=HELLO, response_format=bad)


def test_a_tool_that_must_be_called_is_called(client):
    wanted = {"model": "tiny", "messages": HELLO, "max_tokens": 80}
    named = {"type": "function", "function": {"name": "get_weather"}}
    whole = client.chat.completions.create(**wanted, tools=[TOOL, OTHER], tool_choice=named)
    (call,) = whole.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["days"] in {1, 2, 3}
    assert whole.choices[0].finish_reason == "tool_calls"
    assert whole.choices[0].message.content is None
    chunks = list(client.chat.completions.create(**wanted, tools=[TOOL, OTHER], tool_choice="required", stream=True))
    parts = [c.choices[0].delta.tool_calls[0] for c in chunks if c.choices and c.choices[0].delta.tool_calls]
    assert parts[0].id.startswith("call_")
    assert parts[0].function.name in {"get_weather", "stop"}
    assert isinstance(json.loads("".join(part.function.arguments for part in parts)), dict)
    with pytest.raises(openai.BadRequestError, match="knows no tools"):
        client.chat.completions.create(**wanted, tools=[TOOL])


def test_errors_have_the_form_and_status_that_clients_expect(client):
    with pytest.raises(openai.BadRequestError, match="context") as error:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "word " * 2000}])
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="temperature") as error:
        client.chat.completions.create(model="tiny", messages=HELLO, temperature=-1)
    assert error.value.param == "temperature"
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    with pytest.raises(openai.BadRequestError, match="text only"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": [image]}])
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="tiny", messages=[])


def test_a_client_that_stops_reading_a_stream_frees_its_place(client, tiny):
    stream = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=400, stream=True)
    for _, chunk in zip(range(3), stream, strict=False):
        assert chunk.choices
    stream.close()
    eventually(lambda: tiny.engine.stats().finished["cancelled"] > 0)


def test_anthropics_client_gets_messages_whole_and_streamed(claude):
    wanted = {"model": "tiny", "max_tokens": 12, "messages": HELLO, "system": "Be brief."}
    whole = claude.messages.create(**wanted)
    assert [block.type for block in whole.content] == ["text"]
    assert whole.stop_reason == "max_tokens"
    assert whole.usage.output_tokens == 12
    with claude.messages.stream(**wanted) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert text == whole.content[0].text == last.content[0].text
    assert last.stop_reason == "max_tokens"
    assert last.usage.output_tokens == 12
    counted = claude.messages.count_tokens(model="tiny", messages=HELLO, system="Be brief.").input_tokens
    assert counted == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    stop = text[4:8]
    cut = claude.messages.create(**wanted, stop_sequences=["§§", stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == text[: text.index(stop)]


def test_anthropics_client_gets_tool_calls_and_gives_results(claude):
    tool = {"name": "get_weather", "input_schema": TOOL["function"]["parameters"]}
    wanted = {"model": "tiny", "max_tokens": 80, "tools": [tool]}
    wanted["tool_choice"] = {"type": "tool", "name": "get_weather"}
    whole = claude.messages.create(**wanted, messages=HELLO)
    (block,) = whole.content
    assert (block.type, block.name, whole.stop_reason) == ("tool_use", "get_weather", "tool_use")
    assert block.input["days"] in {1, 2, 3}
    with claude.messages.stream(**wanted, messages=HELLO) as stream:
        last = stream.get_final_message()
    assert last.content[0].input == block.input
    result = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "rain"}]}
    turns = [*HELLO, {"role": "assistant", "content": [block.model_dump()]}, {"role": "user", "content": [result]}]
    assert claude.messages.create(model="tiny", max_tokens=3, messages=turns).usage.output_tokens == 3


def test_anthropics_client_understands_errors(claude):
    with pytest.raises(anthropic.NotFoundError, match="not served here"):
        claude.messages.create(model="claude-x", max_tokens=3, messages=HELLO)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        claude.messages.create(model="tiny", max_tokens=0, messages=HELLO)


def test_characters_of_several_tokens_come_whole(tiny):
    text = "привет 漢字 😀"
    ids = httpx.post(f"{tiny.url}/tokenize", json={"text": text}).json()
    assert ids["count"] == len(ids["tokens"]) > 8
    assert httpx.post(f"{tiny.url}/detokenize", json={"tokens": ids["tokens"]}).json()["text"] == text


def test_curl_streams_and_reads_health_and_metrics(tiny):
    def curl(path, *options):
        done = subprocess.run(
            ["curl", "-sS", "-N", "--max-time", "60", f"{tiny.url}{path}", *options],
            capture_output=True, text=True, check=True, timeout=70,
        )  # fmt: skip
        return done.stdout

    body = json.dumps({"model": "tiny", "messages": HELLO, "max_tokens": 3, "stream": True})
    shown = curl("/v1/chat/completions", "-H", "Content-Type: application/json", "-d", body)
    events = [line.removeprefix("data: ") for line in shown.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    assert all(json.loads(event)["object"] == "chat.completion.chunk" for event in events[:-1])
    health = json.loads(curl("/health"))
    assert health["status"] == "ok"
    assert health["running"] == 0
    exposed = curl("/metrics")
    assert 'compute_node_requests_ended_total{outcome="length"}' in exposed
    assert "compute_node_time_to_first_token_seconds_bucket" in exposed
    assert 'compute_node_http_responses_total{class="2xx",endpoint="chat"}' in exposed
    assert "/v1/chat/completions" in json.loads(curl("/openapi.json"))["paths"]


def test_requests_beyond_the_queue_are_told_when_to_come_back(embedded_store):
    with served(embedded_store, node={"max_running": 1, "max_waiting": 1}) as small:
        body = {"prompt": "It was", "max_tokens": 480, "stream": True, "ignore_eos": True}
        held = [small.send("/v1/completions", body) for _ in range(2)]
        eventually(lambda: small.engine.stats().waiting == 1)
        refused = httpx.post(f"{small.url}/v1/completions", json=body)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"
        held.pop().close()
        eventually(lambda: small.engine.stats().waiting == 0)
        for connection in held:
            connection.close()
        small.idle()
        assert small.engine.stats().finished["cancelled"] == 2


async def test_many_clients_at_once_get_their_own_answers(tiny):
    prompts = [f"In the year {number} there was" for number in range(12)]
    wanted = {"model": "tiny", "max_tokens": 8, "temperature": 0.9, "seed": 5}
    async with openai.AsyncOpenAI(base_url=f"{tiny.url}/v1", api_key="any", max_retries=0) as client:
        alone = [(await client.completions.create(prompt=prompt, **wanted)).choices[0].text for prompt in prompts]

        async def one(prompt):
            stream = await client.completions.create(prompt=prompt, stream=True, **wanted)
            return "".join([chunk.choices[0].text async for chunk in stream])

        assert await asyncio.gather(*map(one, prompts)) == alone
    assert len(set(alone)) > 1


def test_a_model_whose_template_knows_tools_calls_them_by_itself(embedded_store, monkeypatch):
    source = (
        "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{# <tool_call> #}"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    monkeypatch.setattr(ChatTemplate, "from_store", classmethod(lambda cls, store: cls(source, {})))  # noqa: ARG005
    with served(embedded_store) as knowing, openai.OpenAI(base_url=f"{knowing.url}/v1", api_key="any") as client:
        wanted = {"model": "tiny", "messages": HELLO, "max_tokens": 6}
        free = client.chat.completions.create(**wanted, tools=[TOOL])
        assert free.choices[0].message.tool_calls is None
        none = client.chat.completions.create(**wanted, tools=[TOOL], tool_choice="none")
        assert none.usage.prompt_tokens < free.usage.prompt_tokens
        assert none.choices[0].message.content == client.chat.completions.create(**wanted).choices[0].message.content
