"""Clients that nobody should trust: each is refused cleanly or let go, and the others do not notice."""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import time
from pathlib import Path

import httpx
import pytest
from api_server import served
from daemons import eventually

KEY = "a-key-that-nobody-guesses"
# The server's little patience ends connections that rest, too: none is kept for another request.
web = httpx.Client(timeout=60, limits=httpx.Limits(max_keepalive_connections=0))
SHORT = {"model": "tiny", "prompt": "It was", "max_tokens": 2}
LONG = {"model": "tiny", "prompt": "It was", "max_tokens": 180, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(embedded_store):
    """With a key, an allowed site, and little patience."""
    limits = {"client_seconds": 1.0, "max_body": "1MB", "max_connections": 40}
    with served(embedded_store, api_key=KEY, cors=("https://chat.example",), **limits) as model:
        yield model


@pytest.fixture(scope="module", autouse=True)
def close_the_client():
    yield
    web.close()


@pytest.fixture(autouse=True)
def others_are_unharmed(server):
    yield
    server.idle()
    assert ask(server).status_code == 200


def ask(server, path="/v1/completions", body=SHORT, key=KEY, **headers):
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    given = {"Authorization": f"Bearer {key}"} if key else {}
    return web.post(f"{server.url}{path}", json=body, headers=given | named)


def rss_bytes():
    return int(re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{os.getpid()}/status").read_text())[1]) << 10


def raw(server, data):
    """What comes back for these bytes until the server closes the connection."""
    with server.connect() as connection:
        connection.sendall(data)
        return read_all(connection)


def drip(connection, data, seconds):
    """Send the same again and again, with pauses, until the server has had enough."""
    for _ in range(200):
        connection.sendall(data)
        time.sleep(seconds)


def read_all(connection):
    found = b""
    try:
        while more := connection.recv(65536):
            found += more
    except ConnectionError:
        pass
    return found


@pytest.mark.parametrize("key", ["", "wrong", KEY[:-1], KEY + "x", "\x7f"])
def test_without_the_key_nothing_is_answered(server, key):
    for path in ("/v1/completions", "/v1/messages", "/tokenize"):
        answer = ask(server, path, key=key)
        assert answer.status_code == 401
        assert "key" in answer.json()["error"]["message"]
    for path in ("/metrics", "/openapi.json", "/v1/models", "/nothing"):
        assert web.get(f"{server.url}{path}").status_code == 401
    assert web.get(f"{server.url}/health").status_code == 200
    assert web.get(f"{server.url}/").status_code == 200


def test_the_key_may_come_as_either_client_sends_it(server):
    assert ask(server, key="", x_api_key=KEY).status_code == 200
    assert ask(server, "/v1/messages", key="").json()["type"] == "error"


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "localhost.evil.example", "", "a b", "127.0.0.1.nip.io"]
)
def test_other_names_of_this_host_are_refused(server, host):
    answer = raw(server, f"GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    assert answer.startswith((b"HTTP/1.1 403", b"HTTP/1.1 400"))


def test_pages_of_other_sites_are_refused_and_allowed_ones_are_not(server):
    assert ask(server, Origin="https://evil.example").status_code == 403
    assert ask(server, Origin="null").status_code == 403
    assert ask(server, Origin=server.url).status_code == 200
    answer = ask(server, Origin="https://chat.example")
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://chat.example"
    question = {"Access-Control-Request-Method": "POST"}
    allowed = web.options(f"{server.url}/v1/completions", headers={"Origin": "https://chat.example", **question})
    assert allowed.status_code == 204
    assert "authorization" in allowed.headers["access-control-allow-headers"]
    refused = web.options(f"{server.url}/v1/completions", headers={"Origin": "https://evil.example", **question})
    assert refused.status_code == 403
    assert "access-control-allow-origin" not in refused.headers


@pytest.mark.parametrize(
    "path",
    ["/page/../app.py", "/page/%2e%2e/app.py", "/page/..%2fapp.py", "//etc/passwd", "/page/%00", "/page/", "/pages"],
)
def test_paths_lead_nowhere_else(server, path):
    head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n\r\n"
    answer = raw(server, head.encode())
    assert answer.startswith((b"HTTP/1.1 404", b"HTTP/1.1 400"))
    assert b"root:" not in answer


def test_a_body_is_counted_as_it_is_read(server):
    announced = ask(server, body=SHORT | {"prompt": "x" * 1_200_000})
    assert announced.status_code == 413
    sent = 0

    def endless():
        nonlocal sent
        yield b'{"prompt": "'
        while True:
            sent += 1 << 16
            yield b"x" * (1 << 16)

    before = rss_bytes()
    given = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    try:
        chunked = web.post(f"{server.url}/v1/completions", content=endless(), headers=given)
        assert chunked.status_code == 413
        assert chunked.json()["error"]["code"] == "request_too_large"
    except httpx.TransportError:
        pass  # the server has closed the connection while we were still sending
    assert sent < 64 << 20
    assert rss_bytes() - before < 32 << 20


def test_who_sends_too_much_hears_why(server):
    body = b"x" * 3_000_000
    with server.send("/v1/completions", body, headers=[f"Authorization: Bearer {KEY}"]) as connection:
        assert read_all(connection).startswith(b"HTTP/1.1 413")


def test_a_body_that_is_wrong_everywhere_is_refused_at_its_first_fault(server):
    given = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    beginning = b'{"model": "tiny", "messages": [{"role": "user", "content": "hi"}], '
    before = rss_bytes()
    for path, body in (
        ("completions", b'{"prompt": [' + b"-1," * 300_000 + b"1]}"),
        ("completions", b'{"prompt": "a", "logit_bias": {' + b",".join(b'"%d":900' % n for n in range(70_000)) + b"}}"),
        ("chat/completions", beginning + b'"functions": [' + rb'"\ud800",' * 80_000 + b"1]}"),
        ("chat/completions", beginning + b'"functions": [' + b"NaN," * 200_000 + b"1]}"),
        ("chat/completions", b'{"messages": [{"role": "user", "content": [' + b"{}," * 300_000 + b"1]}]}"),
        ("completions", b'{"prompt": "a"' + b',"":1' * 150_000 + b"}"),
    ):
        answer = web.post(f"{server.url}/v1/{path}", content=body, headers=given)
        assert answer.status_code == 400, answer.text
    assert rss_bytes() - before < 96 << 20


def test_a_head_without_end_is_refused(server):
    assert raw(server, b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"X: " + b"y" * 100_000).startswith(b"HTTP/1.1 400")
    assert raw(server, b"\x16\x03\x01\x02\x00\x01" + b"\x00" * 600).startswith(b"HTTP/1.1 400")
    many = b"".join(b"X-%d: y\r\n" % number for number in range(9000))
    assert raw(server, b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n" + many).startswith(b"HTTP/1.1 400")


def test_bodies_that_are_no_json_are_refused(server):
    given = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    for body in (
        b"",
        b"{",
        b"[" * 100_000,
        b'{"prompt": ' * 9000,
        b"\xff\xfe",
        b'{"seed": ' + b"9" * 9000 + b"}",
        b"null",
        rb'{"prompt": "\ud800"}',
    ):
        answer = web.post(f"{server.url}/v1/completions", content=body, headers=given)
        assert answer.status_code == 400, body[:20]
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_broken_json_is_told_with_its_place(server):
    given = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    error = web.post(f"{server.url}/v1/completions", content=b'{"prompt": "It was", }', headers=given).json()["error"]
    assert error["message"].startswith("the body is not JSON: ")
    assert error["message"].endswith(" at character 21")
    assert error["param"] is None


def test_of_a_value_that_may_be_of_several_kinds_the_fault_of_the_likeliest_is_told(server):
    error = ask(server, body=SHORT | {"prompt": [1, -1]}).json()["error"]
    assert error["message"].endswith(".1: Input should be greater than or equal to 0")


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("completions", "max_tokens", "5"),
        ("completions", "max_tokens", True),
        ("completions", "max_tokens", 5.0),
        ("completions", "temperature", "0.5"),
        ("completions", "top_k", True),
        ("completions", "echo", 1),
        ("completions", "stream", "true"),
        ("completions", "stop_token_ids", ["1"]),
        ("completions", "logit_bias", {"5": "1"}),
        ("chat/completions", "top_logprobs", "1"),
        ("chat/completions", "stream_options", {"include_usage": "yes"}),
        ("messages", "top_p", "0.5"),
        ("messages", "thinking", {"type": "enabled", "budget_tokens": "64"}),
    ],
)
def test_numbers_and_switches_are_those_of_json(server, path, field, value):
    body = SHORT | {"messages": [{"role": "user", "content": "hi"}]} | {field: value}
    error = ask(server, f"/v1/{path}", body=body).json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(field)


def test_a_text_that_is_far_too_long_is_refused_wherever_it_stands(server):
    text = "a b " * 200_000
    chat = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 2}
    for path, body in (
        ("/v1/completions", SHORT | {"prompt": text}),
        ("/v1/completions", SHORT | {"prompt": ["It was", text]}),
        ("/v1/chat/completions", chat),
        ("/v1/messages", chat),
        ("/v1/messages/count_tokens", chat),
        ("/tokenize", {"text": text}),
    ):
        error = ask(server, path, body=body).json()["error"]
        assert re.match(r"the prompt has more than (192|65536) tokens", error["message"]), error


def test_a_body_of_another_type_is_told_what_is_missing(server):
    answer = web.post(f"{server.url}/v1/completions", data={"prompt": "It"}, headers={"x-api-key": KEY})
    assert answer.status_code == 400
    assert "Content-Type: application/json" in answer.json()["error"]["message"]
    assert web.get(f"{server.url}/v1/completions", headers={"x-api-key": KEY}).status_code == 405
    assert "error" in web.get(f"{server.url}/nothing", headers={"x-api-key": KEY}).json()


def test_values_that_no_tokenizer_or_template_likes_are_refused(server):
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    deep = {}
    for _ in range(60):
        deep = {"items": deep}
    for path, body in (
        ("/v1/completions", SHORT | {"prompt": "\ud800"}),
        ("/v1/completions", SHORT | {"prompt": []}),
        ("/v1/completions", SHORT | {"prompt": [[]]}),
        ("/v1/completions", SHORT | {"prompt": [-1]}),
        ("/v1/completions", SHORT | {"n": 1000}),
        ("/v1/completions", SHORT | {"logit_bias": {"99999999": 1}}),
        ("/v1/chat/completions", chat | {"messages": [{"role": "king", "content": "hi"}]}),
        ("/v1/chat/completions", chat | {"messages": [{"role": "user", "content": "\udfff"}]}),
        ("/v1/chat/completions", chat | {"chat_template_kwargs": {"messages": []}}),
        ("/v1/chat/completions", chat | {"response_format": {"type": "json_schema", "json_schema": {"schema": deep}}}),
        ("/v1/messages", chat | {"tools": [{"name": "../x"}]}),
        ("/detokenize", {"tokens": [1 << 30]}),
    ):
        answer = web.post(
            f"{server.url}{path}",
            content=json.dumps(body),
            headers={"x-api-key": KEY, "Content-Type": "application/json"},
        )
        assert answer.status_code == 400, (path, body, answer.text)


def test_a_client_that_sends_too_slowly_is_let_go(server):
    with server.connect() as silent, server.connect() as dripping, server.connect() as half:
        dripping.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nx-api-key: {KEY}\r\nContent-Length: 100\r\n\r\n{{"
        half.sendall(head.encode())
        with pytest.raises(ConnectionError):
            drip(dripping, b"X: y\r\n", 0.2)
        assert read_all(silent) == b""
        assert b"408" in read_all(half).partition(b"\r\n")[0]


def test_a_client_that_does_not_read_is_let_go(server):
    tokenizer = server.service.tokenizer
    longest = max(range(1000, 1100), key=lambda token: len(tokenizer.bytes_of(token)))
    content = json.dumps({"tokens": [longest] * 150_000}).encode()
    head = f"POST /detokenize HTTP/1.1\r\nHost: 127.0.0.1\r\nx-api-key: {KEY}\r\nContent-Type: application/json\r\n"
    with socket.socket() as lazy:
        # Before it connects, so that the window is small from the start.
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        lazy.connect(("127.0.0.1", server.port))
        lazy.settimeout(60)
        lazy.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode())

        def connections():
            return [one for one in list(server.http._server.server_state.connections) if one.client == ours]

        ours = lazy.getsockname()
        (theirs,) = eventually(connections)
        # The kernel would take a whole answer from the server's hands, if it could.
        theirs.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        lazy.sendall(content)
        eventually(lambda: not connections())
        answer = read_all(lazy)
    promised = int(re.search(rb"content-length: (\d+)", answer)[1])
    assert promised > 1 << 20
    assert len(answer) < promised


def test_a_client_that_asks_before_it_is_answered_is_seen_to_go(server):
    before = server.engine.stats().finished["cancelled"]
    connection = server.send("/v1/completions", LONG, headers=[f"x-api-key: {KEY}"])
    eventually(lambda: server.engine.stats().running == 1)
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 3)
    time.sleep(0.1)
    connection.close()
    eventually(lambda: server.engine.stats().finished["cancelled"] == before + 1)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("reset", [True, False])
def test_closing_the_socket_in_the_middle_of_an_answer_frees_its_place(server, stream, reset):
    before = server.engine.stats().finished["cancelled"]
    connection = server.send("/v1/completions", LONG | {"stream": stream}, headers=[f"x-api-key: {KEY}"])
    if stream:
        assert b"data: " in b"".join(connection.recv(4096) for _ in range(2))
    eventually(lambda: server.engine.stats().running == 1)
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    eventually(lambda: server.engine.stats().finished["cancelled"] == before + 1)
    server.idle()


def test_closing_the_socket_in_the_queue_or_in_the_prompt_frees_its_place(server):
    before = server.engine.stats().finished["cancelled"]
    body = LONG | {"prompt": "word " * 80, "max_tokens": 100}
    connections = [server.send("/v1/completions", body, headers=[f"x-api-key: {KEY}"]) for _ in range(8)]
    eventually(lambda: server.engine.stats().waiting == 4)
    for connection in reversed(connections):
        connection.close()
    eventually(lambda: server.engine.stats().finished["cancelled"] == before + 8)
    server.idle()


def test_more_connections_than_allowed_are_sent_away(server):
    held = [server.connect() for _ in range(60)]
    try:
        answers = eventually(
            lambda: raw(server, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        )
        assert b" 503 " in answers.partition(b"\r\n")[0]
    finally:
        for connection in held:
            connection.close()
    eventually(lambda: ask(server).status_code == 200)


def test_labels_of_metrics_do_not_grow_with_what_clients_send(server):
    def series():
        text = web.get(f"{server.url}/metrics", headers={"x-api-key": KEY}).text
        return [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]

    before = series()
    for number in range(50):
        web.get(f"{server.url}/{number}", headers={"x-api-key": KEY, "User-Agent": f"client-{number}"})
    assert series() == before
    assert len(before) < 200
