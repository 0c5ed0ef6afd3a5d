"""Conversations that are kept in files, and messages of many lines, as a person types them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import termios

import pytest
from daemons import eventually

from compute_node import cli

CHAT = ["--in-process", "--max-tokens", "6"]


@pytest.fixture
def chat(capsys, monkeypatch, embedded_store):
    """Runs the command here with these lines on its standard input; returns exit code, stdout, stderr."""

    def run(text, *options):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        code = cli._run(["chat", str(embedded_store), *CHAT, *map(str, options)])
        return code, *capsys.readouterr()

    return run


def test_a_conversation_is_opened_again_warm_and_goes_on_with_the_same_tokens(chat, tmp_path):
    session = tmp_path / "talk.json"
    _, whole, _ = chat("It was a fine\nand then the old\n")
    code, first, err = chat("It was a fine\n", "--session", session)
    assert code == 0
    assert "going on" not in err
    assert [m["role"] for m in json.loads(session.read_text())["messages"]] == ["user", "assistant"]
    assert session.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "talk.json.kv").stat().st_mode & 0o777 == 0o600
    _, second, err = chat("and then the old\n", "--session", session)
    assert re.search(r"going on with .*talk.json: 2 messages, saved .* UTC; \d+ tokens are warm", err)
    assert first + second == whole
    assert len(json.loads(session.read_text())["messages"]) == 4


def test_without_the_warm_rows_a_conversation_is_computed_again(chat, tmp_path):
    session, rows = tmp_path / "talk.json", tmp_path / "talk.json.kv"
    chat("It was a fine\n", "--session", session)
    _, warm, _ = chat("and then the old\n", "--session", session)
    kept = json.loads(session.read_text())
    for damage in (rows.unlink, lambda: rows.write_bytes(b"PK\x03\x04 nothing"), lambda: rows.write_bytes(b"")):
        session.write_text(json.dumps({**kept, "messages": kept["messages"][:2]}))
        damage()
        code, cold, err = chat("and then the old\n", "--session", session)
        assert code == 0
        assert "computes it again" in err
        assert cold == warm
    content = bytearray(rows.read_bytes())
    content[len(content) // 2] ^= 1
    rows.write_bytes(content)
    assert "computes it again" in chat("/quit\n", "--session", session)[2]


def test_files_that_are_no_conversation_with_this_model_are_refused(chat, tmp_path):
    session = tmp_path / "talk.json"
    chat("It was\n", "--session", session, "--system", "Once")
    kept = json.loads(session.read_text())
    assert kept["messages"][0] == {"role": "system", "content": "Once"}
    for content, why in (
        ("{", "cannot be read"),
        ("[]", "no conversation"),
        (json.dumps(kept | {"version": 99}), "no conversation"),
        (json.dumps(kept | {"fingerprint": "0" * 64}), "another model"),
        (json.dumps(kept | {"messages": [{"role": "king", "content": "x"}]}), "messages"),
    ):
        session.write_text(content)
        code, out, err = chat("hello\n", "--session", session)
        assert (code, out) == (2, "")
        assert why in err
        assert session.read_text() == content
    session.write_text(json.dumps(kept))
    assert "another system message" in chat("hello\n", "--session", session, "--system", "Twice")[2]
    code, _, err = chat("/reset\n", "--session", session)
    assert code == 0
    assert json.loads(session.read_text())["messages"] == kept["messages"][:1]


def test_a_message_in_triple_quotes_may_have_many_lines(chat, tmp_path):
    session = tmp_path / "talk.json"
    chat('"""It was\na fine\n\nmorning"""\n"""one line"""\n', "--session", session)
    said = [m["content"] for m in json.loads(session.read_text())["messages"] if m["role"] == "user"]
    assert said == ["It was\na fine\n\nmorning", "one line"]


@pytest.mark.parametrize("plain", [True, False], ids=["LANG=C", "UTF-8"])
def test_a_paste_of_many_lines_is_one_message(plain):
    reading = "r = LineReader()\nwhile m := r.message(): print(ascii(m))"
    program = f"from compute_node.commands.line_reader import LineReader\n{reading}"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG"))}
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0"} if plain else {"LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "utf-8:strict"}
    ours, theirs = pty.openpty()
    shown = bytearray()

    def read():
        if select.select([ours], [], [], 0.1)[0]:
            with contextlib.suppress(OSError):  # the other end of the terminal is closed
                shown.extend(os.read(ours, 65536))
        return shown

    def prompted():
        """At a prompt; between two of them the terminal has another mode, in which Ctrl-D gets lost."""
        return read().endswith((b"> ", b"> \x1b[?2004h"))

    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        env=kept | locale | {"TERM": "xterm"},
    ) as child:  # fmt: skip
        os.close(theirs)
        eventually(prompted)
        text = "привет\n漢字 and\nthe end"
        if plain:
            assert termios.tcgetattr(ours)[3] & termios.ICANON
            os.write(ours, text.encode() + b"\n")
        else:
            os.write(ours, b"\x1b[200~" + text.encode() + b"\x1b[201~\r")
        eventually(lambda: ascii(text).encode() in read() and prompted())
        os.write(ours, b"next\n" if plain else b"next\r")
        eventually(lambda: b"'next'" in read() and prompted())
        if not plain:
            os.write(ours, b"\xff\r")
            eventually(lambda: rb"'\udcff'" in read() and prompted())
        os.write(ours, b"\x04")
        assert eventually(lambda: read() and child.poll() is not None)
        assert child.returncode == 0
    os.close(ours)
