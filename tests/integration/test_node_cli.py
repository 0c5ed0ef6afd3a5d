"""The command line of a compute node, mostly in this process, and as a real process where that matters."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from compute_node import cli, embedded
from compute_node.text.tokenizer import Tokenizer
from tierd.addresses import default_socket
from tierd.checkpoint.convert import convert
from tierd.store.synthetic import make_store

ORACLES = Path(__file__).parents[1] / "oracles"
NODE = [sys.executable, "-m", "compute_node"]
COUNTED = """
import sys
from numba import njit
from numba.core import event
with event.install_recorder("numba:run_pass") as passes:
    from compute_node import cli
    code = cli._run(sys.argv[1:])
print(len(passes.buffer), file=sys.stderr)
with event.install_recorder("numba:run_pass") as passes:
    njit("int64(int64)")(lambda x: x)
print(len(passes.buffer), file=sys.stderr)
sys.exit(code)
"""
"""A node that counts passes of the compiler; then, to show that they are seen, those of one small function."""


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("embedded") / "store"
    convert(embedded.path(), path, experts="int4-g64", dense="bf16")
    return str(path)


@pytest.fixture
def node(capsys, monkeypatch):
    """Runs a command here; returns exit code, stdout, stderr."""

    def run(*arguments, stdin=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = cli._run([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return run


def test_version_and_help(node):
    code, out, _ = node("--version")
    assert code == 0
    assert out.startswith("compute-node ")
    code, out, _ = node("--help")
    assert code == 0
    assert all(command in out for command in ("generate", "chat", "check-oracle"))


def test_text_goes_to_stdout_and_statistics_to_stderr(node, store):
    code, out, err = node("generate", store, "--in-process", "-p", "It was", "--max-tokens", 8)
    assert code == 0
    assert len(out) > 10
    assert "8 tokens" in err
    assert "asked" in err
    assert "Qwen3-MoE" in err
    assert err.count("tok/s: it reached ") + err.count("and this run was faster") == 1


def test_json_is_one_object_whose_figures_add_up(node, store):
    code, out, err = node(
        "generate", store, "--in-process", "-p", "It was", "--max-tokens", 8, "--json", "--threads", 1
    )
    assert code == 0
    assert not err
    answer = json.loads(out)
    assert len(answer["token_ids"]) == 8
    assert answer["unique_experts"] == answer["hits"] + answer["misses"] + answer["joined"]
    assert answer["tiers"] == {"ram": answer["hits"], "drive": answer["misses"]}
    assert (answer["finish_reason"], answer["numerics"], answer["threads"]) == ("length", "exact", 1)
    assert len(answer["fingerprint"]) == 64
    assert answer["kernel_path"] in {"avx512", "avx2", "portable"}
    assert answer["wait_seconds"] + answer["compute_seconds"] <= answer["seconds"]
    assert 0 < answer["time_to_first_token_seconds"] < answer["seconds"]
    assert answer["limit_share"] == pytest.approx(answer["tokens_per_second"] / answer["limit_tokens_per_second"])
    assert min(1, answer["limit_share"]) + sum(answer["lost_to"].values()) == pytest.approx(1)


def test_one_token_has_no_speed_and_no_limit(node, store):
    answer = json.loads(node("generate", store, "--in-process", "-p", "It", "--max-tokens", 1, "--json")[1])
    assert answer["limit_share"] is answer["lost_to"] is answer["limit_tokens_per_second"] is None


def test_a_smaller_arena_gives_the_same_tokens(node, store):
    command = ["generate", store, "--in-process", "-p", "In the beginning", "--max-tokens", 12, "--json"]
    whole = json.loads(node(*command)[1])
    small = json.loads(node(*command, "--arena", "5%")[1])
    assert small["token_ids"] == whole["token_ids"]
    assert small["misses"] > whole["misses"]


def test_a_daemon_gives_the_same_tokens_and_the_node_counts_the_same_experts(node, store):
    command = ["generate", store, "-p", "In the beginning", "--max-tokens", 12, "--json"]
    alone = json.loads(node(*command, "--in-process")[1])
    code, out, _ = node(*command, "--arena", "10%")
    served = json.loads(out)
    assert code == 0
    assert served["token_ids"] == alone["token_ids"]
    assert served["unique_experts"] == alone["unique_experts"]
    assert served["unique_experts"] == served["hits"] + served["misses"] + served["joined"]


def test_a_directory_is_served_by_the_daemon_that_serves_it_already(node, store, serve, folder, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    address = default_socket(Path(store))
    daemon = serve(store, "--arena", "50%", listen=str(address))
    command = ["generate", store, "-p", "In the beginning", "--max-tokens", 4, "--json"]
    code, out, err = node(*command)
    assert code == 0
    assert f"{address} serves this store" in err
    assert daemon.stats()["requests"]["requests"] == json.loads(out)["unique_experts"] > 0
    _, again, err = node(*command, "--arena", "10%")
    assert "a daemon of its own" in err
    assert json.loads(again)["token_ids"] == json.loads(out)["token_ids"]
    assert daemon.stats()["requests"]["requests"] == json.loads(out)["unique_experts"]


def test_a_daemon_of_another_store_of_that_name_is_left_alone(node, store, serve, folder, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    other = folder / "other" / Path(store).name
    make_store(other, layers=2, experts=4, top_k=2)
    serve(other, listen=str(default_socket(other)))
    code, out, err = node("generate", store, "-p", "In the beginning", "--max-tokens", 4, "--json")
    assert code == 0, err
    assert len(json.loads(out)["token_ids"]) == 4
    assert not err


def test_events_are_json_lines(node, store):
    _, out, _ = node("generate", store, "--in-process", "-p", "It was", "--max-tokens", 4, "--events")
    events = [json.loads(line) for line in out.splitlines()]
    assert [event["event"] for event in events] == ["start", *["token"] * 4, "done"]
    assert [event["id"] for event in events[1:-1]] == events[-1]["token_ids"]
    assert "".join(event["text"] for event in events[1:-1]) == events[-1]["text"]
    assert events[0]["prompt_tokens"] == events[-1]["prompt_tokens"]


def test_the_prompt_may_come_from_anywhere(node, store, tmp_path, monkeypatch):
    text = "привет 漢字 😀"
    command = ["generate", store, "--in-process", "--max-tokens", 3, "--json"]
    file = tmp_path / "prompt.txt"
    file.write_text(text, encoding="utf-8")
    answers = [node(*command, "-p", text), node(*command, "-f", file), node(*command, stdin=text.encode())]
    monkeypatch.setenv("TIERD_NODE_PROMPT", text)
    answers.append(node(*command))
    seen = [json.loads(out) for _, out, _ in answers]
    assert len({(tuple(answer["token_ids"]), answer["prompt_tokens"]) for answer in seen}) == 1
    assert seen[0]["prompt_tokens"] > 3


def test_a_stop_string_ends_the_answer(node, store):
    command = ["generate", store, "--in-process", "-p", "It was a fine", "--max-tokens", 40, "--json"]
    text = json.loads(node(*command)[1])["text"]
    word = text.split()[2]
    answer = json.loads(node(*command, "--stop", word)[1])
    assert answer["finish_reason"] == "stop"
    assert answer["text"] == text[: text.index(word)]


def test_settings_come_from_flag_then_environment_then_file(node, store, tmp_path, monkeypatch):
    config = tmp_path / "node.toml"
    config.write_text("[node]\nmax_tokens = 2\nin_process = true\n", encoding="utf-8")
    command = ["generate", store, "-p", "It", "--json", "--config", config]
    assert len(json.loads(node(*command)[1])["token_ids"]) == 2
    monkeypatch.setenv("TIERD_NODE_MAX_TOKENS", "3")
    assert len(json.loads(node(*command)[1])["token_ids"]) == 3
    assert len(json.loads(node(*command, "--max-tokens", 4)[1])["token_ids"]) == 4


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["generate", "STORE", "--temperature", "-1"], 2, "temperature"),
        (["generate", "STORE", "--top-p", "0"], 2, "top_p"),
        (["generate", "STORE", "--max-tokens", "0"], 2, "max_tokens"),
        (["generate", "STORE", "--threads", "0"], 2, "threads"),
        (["generate", "STORE", "--seed", "-5"], 2, "seed"),
        (["generate", "STORE", "--stop", "", "-p", "x"], 2, "stop string"),
        (["generate", "STORE", "--context", "4096", "-p", "x"], 2, "context"),
        (["generate", "STORE", "--context", "4", "-p", "one two three four"], 2, "does not fit"),
        (["generate", "STORE", "--arena", "7", "-p", "x"], 2, "holds no expert"),
        (["generate", "STORE", "--arena", "much", "-p", "x"], 2, "--arena"),
        (["generate", "STORE", "-p", "x", "-f", "y"], 2, "not both"),
        (["generate", "STORE", "-f", "/nowhere/at/all"], 2, "/nowhere/at/all"),
        (["generate", "STORE", "-p", ""], 2, "no tokens"),
        (["generate", "/nowhere/at/all", "-p", "x"], 2, "/nowhere/at/all"),
        (["generate", "STORE", "--config", "/nowhere.toml", "-p", "x"], 2, "/nowhere.toml"),
        (["generate"], 2, "store"),
        (["generate", "STORE", "--nonsense"], 2, "--nonsense"),
        (["sing"], 2, "sing"),
        (["check-oracle", "/nowhere/at/all"], 2, "ref.npz"),
    ],
)
def test_wrong_use_is_a_message_and_exit_code_2(node, store, arguments, code, message):
    inside = ["--in-process"] if arguments[0] in ("generate", "chat") and len(arguments) > 1 else []
    found, _, err = node(*[store if item == "STORE" else item for item in arguments], *inside)
    assert found == code
    assert message in err


def test_input_that_is_not_utf8_is_refused(node, store):
    code, _, err = node("generate", store, "--in-process", stdin=b"abc\xff")
    assert code == 2
    assert "not UTF-8: byte 3" in err
    code, _, err = node("generate", store, "--in-process", "-p", os.fsdecode(b"ab\xff"))
    assert code == 2
    assert "not UTF-8: byte 2" in err


def test_a_damaged_store_is_exit_code_1(node, store, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for item in Path(store).iterdir():
        (broken / item.name).write_bytes(item.read_bytes())
    shard = next(broken.glob("experts-*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-5000:] = b"\x55" * 5000
    shard.write_bytes(content)
    code, _, err = node("generate", broken, "--in-process", "-p", "one two three four five", "--max-tokens", 200)
    assert code == 1
    assert shard.name in err


@pytest.mark.parametrize("mode", [[], ["--in-process"], ["--in-process", "--arena", "10%", "--threads", "1"]])
def test_check_oracle_says_what_agrees(node, mode):
    code, out, _ = node("check-oracle", ORACLES / "mixtral_sliding", "--json", *mode)
    result = json.loads(out)
    assert code == 0
    assert result["family"] == "mixtral"
    assert result["max_logit_error"] < 1e-5
    assert result["greedy_match"] is True
    assert result["greedy_equal"] == "16/16"
    assert result["routes_equal"] is True


def test_check_oracle_fails_on_another_model(node, tmp_path):
    for item in (ORACLES / "olmoe").iterdir():
        (tmp_path / item.name).write_bytes(item.read_bytes())
    with np.load(tmp_path / "ref.npz") as data:
        reference = dict(data)
    reference["logits"] = reference["logits"] + 0.01
    reference["greedy"] = np.roll(reference["greedy"], 1)
    np.savez(tmp_path / "ref.npz", **reference)
    code, out, _ = node("check-oracle", tmp_path, "--in-process")
    assert code == 1
    assert "✗ olmoe" in out
    code, out, _ = node("check-oracle", tmp_path, "--in-process", "--json")
    assert code == 1
    assert json.loads(out)["greedy_match"] is False


def test_chat_keeps_a_conversation(node, store):
    script = "Good morning\n/stats\nAnd then?\n/reset\nGood morning\n/help\n/dance\n\n/quit\nnever read\n"
    code, out, err = node("chat", store, "--in-process", "--max-tokens", 5, stdin=script.encode())
    assert code == 0
    answers = out.splitlines()
    assert err.count("5 tokens") == 3
    assert err.count("  limit     ") == 3
    assert "answers   1 ·" in err
    assert "forgotten" in err
    assert "/dance is not a command" in err
    assert "Ctrl-C stops an answer" in err
    assert out.startswith(answers[0])
    assert out.endswith(answers[-1] + "\n")


def test_chat_goes_on_after_a_message_that_does_not_fit(node, store):
    script = "word " * 200 + "\nhello\n"
    code, _, err = node("chat", store, "--in-process", "--context", 64, "--max-tokens", 4, stdin=script.encode())
    assert code == 0
    assert "does not fit the context of 64 tokens" in err
    assert err.count("4 tokens ·") == 1


def test_chat_without_a_template_says_what_to_do(node, tmp_path):
    source, target = tmp_path / "source", tmp_path / "store"
    source.mkdir()
    for item in embedded.path().iterdir():
        if item.is_file() and item.name not in ("tokenizer_config.json", "chat_template.jinja"):
            (source / item.name).symlink_to(item)
    convert(source, target, experts="int4-g64")
    code, _, err = node("chat", target, "--in-process")
    assert code == 2
    assert "compute-node generate" in err


def test_utf8_survives_a_locale_that_knows_no_utf8(store):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHON"))}
    prompt = "привет 漢字"
    shown = subprocess.run(
        [*NODE, "generate", store, "--in-process", "--max-tokens", "3", "--events", "-p", prompt],
        env=environment | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        capture_output=True,
        timeout=60,
        check=True,
    )
    events = [json.loads(line) for line in shown.stdout.decode("utf-8").splitlines()]
    assert len(events) == 5
    tokenizer = Tokenizer((embedded.path() / "tokenizer.json").read_bytes())
    assert events[0]["prompt_tokens"] == len(tokenizer.encode(prompt))
    assert shown.stderr == b""


def test_a_second_start_compiles_nothing(store):
    def passes():
        command = [
            sys.executable,
            "-c",
            COUNTED,
            "generate",
            store,
            "--in-process",
            "-p",
            "It was",
            "--max-tokens",
            "3",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=True)
        node, small = map(int, re.findall(r"^(\d+)$", done.stderr, re.MULTILINE))
        assert small > 0
        return node

    assert passes() == 0 or passes() == 0


def test_ctrl_c_ends_generate_with_130_and_no_traceback(store):
    command = [
        *NODE,
        "generate",
        store,
        "--in-process",
        "-p",
        "It was",
        "--max-tokens",
        "2000",
        "--ignore-eos",
        "--events",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        for _ in range(3):
            assert child.stdout.readline()
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert b"Traceback" not in err


def test_ctrl_c_in_chat_stops_the_answer_and_not_the_program(store):
    command = [*NODE, "chat", store, "--in-process", "--max-tokens", "1900"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        child.stdin.write(b"Good morning\n")
        child.stdin.flush()
        assert child.stdout.read(20)
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(b"/stats\n/quit\n", timeout=60)
    assert child.returncode == 0
    assert b"cancelled" in err
    assert b"answers   1" in err
    assert b"Traceback" not in err


def test_a_reader_that_goes_away_ends_the_program_quietly(store):
    command = [*NODE, "generate", store, "--in-process", "-p", "It was", "--max-tokens", "2000", "--ignore-eos"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout.read(10)
        child.stdout.close()
        err = child.stderr.read()
        assert child.wait(timeout=60) == 1
    assert b"Traceback" not in err
    assert b"BrokenPipe" not in err
