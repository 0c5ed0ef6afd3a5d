"""`--engine transformers`: the authors' own code behind the node's commands, sampler and serving engine."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import numpy as np
import pytest

pytestmark = pytest.mark.oracle

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from api_server import served  # noqa: E402
from tiny_transformers import tiny_model  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402

from compute_node.engine.generate import Finished, GenerationParams, Generator  # noqa: E402
from compute_node.engine.transformers_model import TransformersModel, TransformersOptions  # noqa: E402
from compute_node.serving.engine import Engine  # noqa: E402
from compute_node.serving.requests import Done, FinishReason, Request, Token  # noqa: E402
from tierd.checkpoint.convert import Conversion, convert  # noqa: E402
from tierd.client.in_process import InProcess  # noqa: E402
from tierd.client.source import Phase  # noqa: E402
from tierd.integrations.transformers import load  # noqa: E402
from tierd.integrations.transformers.conversion import plan_by_transformers  # noqa: E402
from tierd.store.store import ExpertStore  # noqa: E402

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
PROMPT = [72, 101, 108, 108, 111, 32, 116, 104, 101, 114, 101]


def make(name, root):
    """A tiny checkpoint with a tokenizer of single bytes and a chat template, and the store of it."""
    model = tiny_model(name)
    model.save_pretrained(root / "checkpoint")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(root / "checkpoint" / "tokenizer.json"))
    (root / "checkpoint" / "chat_template.jinja").write_text(TEMPLATE)
    (root / "checkpoint" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    Conversion.prepare(root / "checkpoint", root / "store", experts="f32", planner=plan_by_transformers).run()
    return root, model


@pytest.fixture(scope="module", params=["deepseek_v4", "inkling", "muse_spark"])
def refused_by_name(request, tmp_path_factory):
    """Families without a native program."""
    return make(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    return make("gpt_oss", tmp_path_factory.mktemp("gpt_oss"))


@pytest.fixture
def opened(gpt_oss):
    source = InProcess(ExpertStore.open(gpt_oss[0] / "store"))
    return TransformersModel(source, TransformersOptions(sequences=3, context=64))


def greedy(model, prompt, count):
    ids = torch.tensor([prompt])
    answer = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return answer[0, len(prompt) :].tolist()


def node(*arguments, **options):
    command = [sys.executable, "-m", "compute_node", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, check=False, **options)


def test_generate_takes_the_engine_that_the_store_needs_and_says_so(refused_by_name):
    root, model = refused_by_name
    text = "Hello there"
    done = node("generate", root / "store", "-p", text, "--max-tokens", 8, "--arena", "50%", "--json")
    assert done.returncode == 0, done.stderr
    assert "the engine is transformers" in done.stderr
    found = json.loads(done.stdout)
    prompt = Tokenizer.from_file(str(root / "checkpoint" / "tokenizer.json")).encode(text).ids
    assert found["token_ids"] == greedy(model, prompt, 8)
    assert found["hits"] + found["misses"] + found["joined"] == found["unique_experts"]
    assert found["misses"] > 0


def test_chat_holds_a_conversation(refused_by_name):
    root, model = refused_by_name
    done = node("chat", root / "store", "--max-tokens", 4, "--in-process", input="Hello\nand again\n/stats\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") >= 2
    assert done.stderr.count(" 4 tokens") == 2
    assert f"{type(model).__name__} has no native program" in done.stderr


def test_the_api_answers_with_the_tokens_of_the_unmodified_model(refused_by_name):
    root, model = refused_by_name
    tokenizer = Tokenizer.from_file(str(root / "checkpoint" / "tokenizer.json"))
    with served(root / "store") as node_:

        def post(path, **body):
            content = json.dumps({"model": "tiny", "max_tokens": 5, "temperature": 0} | body).encode()
            asked = urllib.request.Request(node_.url + path, content, {"Content-Type": "application/json"})
            with urllib.request.urlopen(asked, timeout=120) as answer:
                return json.loads(answer.read())

        answer = post("/v1/completions", prompt="Hello there")
        expected = greedy(model, tokenizer.encode("Hello there").ids, 5)
        assert answer["choices"][0]["text"] == tokenizer.decode(expected)
        assert answer["usage"]["completion_tokens"] == 5
        answer = post("/v1/chat/completions", messages=[{"role": "user", "content": "Hello"}])
        expected = greedy(model, tokenizer.encode("<user>Hello<assistant>").ids, 5)
        assert answer["choices"][0]["message"]["content"] == tokenizer.decode(expected)
        with pytest.raises(urllib.error.HTTPError, match="400"):
            post("/v1/completions", prompt="Hello " * 100)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            post("/v1/completions", model="nobody", prompt="Hello")
        with urllib.request.urlopen(node_.url + "/metrics", timeout=60) as page:
            assert b"experts" in page.read()


def test_a_store_with_a_native_program_runs_in_both_engines(tmp_path, request):
    folder = request.config.rootpath / "tests" / "oracles" / "olmoe"
    convert(folder, tmp_path / "store", experts="f32", dense="f32")
    source = InProcess(ExpertStore.open(tmp_path / "store"))
    generator = Generator(TransformersModel(source, TransformersOptions()), None)
    with np.load(folder / "ref.npz") as reference:
        events = list(generator.generate(reference["input_ids"][0].tolist(), GenerationParams(max_tokens=16)))
        assert isinstance(events[-1], Finished)
        assert list(events[-1].token_ids) == reference["greedy"].tolist()


def test_a_cancelled_step_leaves_the_text_as_it_was(gpt_oss, opened):
    sequence, asked = opened.cache.take(), []
    opened.extend(sequence, PROMPT, phase=Phase.PREFILL)
    given_up = opened.extend(sequence, [5], phase=Phase.DECODE, cancelled=lambda: asked.append(1) or len(asked) > 2)
    assert given_up is None
    assert sequence.tokens == PROMPT
    logits = opened.extend(sequence, [5], phase=Phase.DECODE)
    with torch.no_grad():
        expected = gpt_oss[1](input_ids=torch.tensor([[*PROMPT, 5]])).logits[0, -1].numpy()
    np.testing.assert_allclose(logits[0], expected, atol=1e-5)


def test_a_prefix_in_common_is_not_computed_again_where_the_cache_can_be_cut(gpt_oss, opened):
    sequence = opened.cache.take()
    opened.extend(sequence, PROMPT, phase=Phase.PREFILL)
    assert opened.cache.keep_prefix(sequence, [*PROMPT[:6], 9, 9]) in (0, 6)
    logits = opened.extend(sequence, [*PROMPT[len(sequence.tokens) : 6], 9, 9], phase=Phase.PREFILL)
    with torch.no_grad():
        expected = gpt_oss[1](input_ids=torch.tensor([[*PROMPT[:6], 9, 9]])).logits[0, -1].numpy()
    np.testing.assert_allclose(logits[0], expected, atol=1e-5)


def test_requests_served_together_get_the_tokens_that_each_gets_alone(gpt_oss, opened):
    prompts = [PROMPT, PROMPT[:4], list(range(40, 60))]
    engine, answers, over = Engine(opened, None, max_running=3), {}, threading.Barrier(4)
    done: dict[int, Done] = {}

    def sink_of(number):
        def sink(events):
            answers.setdefault(number, []).extend(event.token for event in events if isinstance(event, Token))
            for event in events:
                if isinstance(event, Done):
                    done[number] = event
                    threading.Thread(target=over.wait, args=(60,)).start()

        return sink

    for number, prompt in enumerate(prompts):
        engine.submit(Request(prompt=tuple(prompt), params=GenerationParams(max_tokens=6)), sink_of(number))
    over.wait(60)
    engine.close()
    assert {event.reason for event in done.values()} == {FinishReason.LENGTH}
    assert [answers[number] for number in range(3)] == [greedy(gpt_oss[1], prompt, 6) for prompt in prompts]
    assert opened.cache.pool.available == opened.cache.pool.pages


def test_pipelines_and_chat_templates_work_on_a_loaded_model(gpt_oss):
    root, unmodified = gpt_oss
    model = load(root / "store", in_process=True)
    tokenizer = model.tierd.tokenizer()
    messages = [{"role": "user", "content": "Hello"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<user>Hello<assistant>"
    answers = []
    for each in (unmodified, model):
        talk = transformers.pipeline("text-generation", model=each, tokenizer=tokenizer)
        (answer,) = talk(messages, max_new_tokens=5, do_sample=False, pad_token_id=0)
        answers.append(answer["generated_text"][-1])
    assert answers[0] == answers[1]
    assert answers[0]["role"] == "assistant"
    model.tierd.close()


def test_a_tokenizer_that_names_code_of_its_own_is_read_from_its_file(gpt_oss, tmp_path):
    root, _ = gpt_oss
    shutil.copytree(root / "checkpoint", tmp_path / "checkpoint")
    named = {"tokenizer_class": "TikTokenTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_kimi.Kimi", None]}}
    (tmp_path / "checkpoint" / "tokenizer_config.json").write_text(json.dumps(named))
    Conversion.prepare(tmp_path / "checkpoint", tmp_path / "store", planner=plan_by_transformers).run()
    model = load(tmp_path / "store", in_process=True)
    own = Tokenizer.from_file(str(root / "checkpoint" / "tokenizer.json"))
    assert model.tierd.tokenizer()("Hello there")["input_ids"] == own.encode("Hello there").ids
    model.tierd.close()


def test_context_and_vocabulary_bound_what_is_computed(opened):
    sequence = opened.cache.take()
    with pytest.raises(Exception, match="outside the vocabulary"):
        opened.extend(sequence, [99999], phase=Phase.DECODE)
    with pytest.raises(Exception, match="do not fit the context"):
        opened.extend(sequence, [1] * 64, phase=Phase.PREFILL) is not None and opened.extend(
            sequence, [1], phase=Phase.DECODE
        )
