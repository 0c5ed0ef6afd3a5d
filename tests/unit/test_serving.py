"""The engine on the embedded model: the same tokens alone and in a crowd, text, scores, constraints, usage."""

from __future__ import annotations

import queue
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from compute_node import embedded
from compute_node.engine.generate import FinishReason, GenerationParams, Generator
from compute_node.engine.likelihood import log_probabilities
from compute_node.engine.model import Model, ModelOptions
from compute_node.engine.sampler import Sampling
from compute_node.kernels.pages import PAGE
from compute_node.serving.engine import Engine
from compute_node.serving.requests import Done, PromptScores, Request, Token
from compute_node.text.tokenizer import Tokenizer
from tierd.checkpoint.convert import convert
from tierd.client.in_process import InProcess
from tierd.client.source import Phase
from tierd.errors import LimitExceeded, TierdError, UsageError
from tierd.store.store import ExpertStore

CONTEXT = 160
TEXT = (
    "It was a fine morning, and the ladies of the house had gone to walk in the park, where the old trees stood in "
    "rows along the river. Nobody had expected a visitor so early in the day; but a carriage came up the road, and "
    "with it the news that everybody had been waiting for since the beginning of the winter."
)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("embedded") / "store"
    convert(embedded.path(), Path(path), experts="int4-g64", dense="bf16")
    return ExpertStore.open(path)


@pytest.fixture(scope="module")
def tokenizer(store):
    return Tokenizer.from_store(store)


@pytest.fixture(scope="module")
def source(store):
    return InProcess(store)


def options(**how):
    return ModelOptions(**({"context": CONTEXT, "sequences": 16, "rows": 64, "head_rows": 16} | how))


@pytest.fixture(scope="module")
def model(source):
    with Model(source, options()) as model:
        yield model


class Heard:
    """Collects the events of requests."""

    def __init__(self):
        self.events = {}
        self.done = queue.SimpleQueue()

    def sink(self, key):
        self.events[key] = []

        def hear(events):
            assert threading.current_thread().name == "engine"
            assert events
            self.events[key] += events
            if isinstance(events[-1], Done):
                self.done.put(key)

        return hear

    def wait(self, count):
        for _ in range(count):
            self.done.get(timeout=120)
        for events in self.events.values():
            assert [isinstance(event, Done) for event in events] == [False] * (len(events) - 1) + [True]

    def tokens(self, key):
        return [event.token for event in self.events[key] if isinstance(event, Token)]

    def text(self, key):
        return "".join(event.text for event in self.events[key] if not isinstance(event, PromptScores))

    def last(self, key):
        return self.events[key][-1]


def answer(engine, request):
    heard = Heard()
    engine.submit(request, heard.sink(0))
    heard.wait(1)
    return heard


def prompts(tokenizer):
    """50 requests: many begin alike, lengths lie around the borders of pages, and they are sampled in many ways."""
    tokens, choose = tokenizer.encode(TEXT), random.Random(5)
    found = []
    for number in range(50):
        length = choose.choice([2, 3, 5, 8, 9, 12, 16, 20, 62, 63, 64, 66])
        prompt = tokens[:length] if number % 3 else tokens[number : number + length]
        sampling = choose.choice([
            Sampling(),
            Sampling(temperature=0.8, seed=number),
            Sampling(temperature=1.2, top_k=20, seed=number),
            Sampling(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
            Sampling(temperature=0.7, frequency_penalty=0.7, logit_bias=((300, 4.0), (301, -5.0)), seed=number),
        ])  # fmt: skip
        params = GenerationParams(max_tokens=choose.randint(2, 4), sampling=sampling, ignore_eos=True)
        found.append(Request(prompt=tuple(prompt), params=params))
    return found


@pytest.fixture(scope="module")
def crowd(model, tokenizer):
    """The requests, and their tokens computed alone by the simple generator."""
    generator, requests = Generator(model, tokenizer), prompts(tokenizer)
    alone = [list(generator.generate(list(request.prompt), request.params))[-1].token_ids for request in requests]
    return requests, [list(tokens) for tokens in alone]


def check_crowd(engine, crowd):
    (requests, alone), heard = crowd, Heard()
    for number, request in enumerate(requests):
        engine.submit(request, heard.sink(number))
    heard.wait(len(requests))
    assert [heard.tokens(number) for number in range(len(requests))] == alone
    assert {heard.last(number).reason for number in range(len(requests))} == {FinishReason.LENGTH}
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.free_pages) == (0, 0, stats.pages)
    return stats


def test_tokens_are_the_same_alone_in_a_crowd_and_with_prefixes_taken_over(model, tokenizer, crowd):
    engine = Engine(model, tokenizer, max_running=16, max_waiting=50)
    # What the generator has left in the cache is taken over, too.
    stats = check_crowd(engine, crowd)
    assert stats.reused_tokens >= 2 * PAGE
    assert stats.rows == sum(len(request.prompt) - 1 + request.params.max_tokens for request in crowd[0]) - (
        stats.reused_tokens
    )
    assert stats.rows / stats.steps > 16
    engine.close()


def test_tokens_are_the_same_in_small_chunks_and_with_pages_lost_and_computed_again(model, tokenizer, crowd):
    budget = 4 * model.cache.layout.page_bytes
    with Model(model.source, options(rows=11, kv_cache=budget)) as small:
        engine = Engine(small, tokenizer, max_running=8, max_waiting=50)
        assert small.cache.pool.pages == 4
        stats = check_crowd(engine, crowd)
        assert stats.preempted > 0
        engine.close()


@pytest.mark.parametrize("family", ["qwen3_next", "glm_moe_dsa"])
def test_tokens_are_the_same_for_families_that_keep_other_things(family, tmp_path):
    """Recurrent states, and latent rows with an indexer: in a crowd, in chunks, and with places lost on the way."""
    convert(Path(__file__).parents[1] / "oracles" / family, tmp_path / "store", experts="native", dense="native")
    source, choose = InProcess(ExpertStore.open(tmp_path / "store")), random.Random(7)
    params = GenerationParams(max_tokens=5, ignore_eos=True)
    requests = [
        Request(prompt=tuple(choose.randrange(100) for _ in range(choose.choice([3, 20, 61, 64]))), params=params)
        for _ in range(8)
    ]
    with Model(source, ModelOptions(context=96, threads=1)) as model:
        generator = Generator(model, None)
        alone = [list(list(generator.generate(list(one.prompt), params))[-1].token_ids) for one in requests]
        layout = model.cache.layout
    budget = 3 * layout.page_bytes + 4 * layout.sequence_bytes
    with Model(source, ModelOptions(context=96, sequences=4, rows=9, kv_cache=budget, threads=1)) as model:
        engine = Engine(model, None, max_running=4)
        stats = check_crowd(engine, (requests, alone))
        assert stats.preempted > 0
        assert (stats.reused_tokens == 0) or not layout.recurrent
        engine.close()


def test_text_and_stop_strings_are_those_of_the_generator(model, tokenizer):
    prompt, params = tokenizer.encode(TEXT[:60]), GenerationParams(max_tokens=24)
    events = list(Generator(model, tokenizer).generate(prompt, params))
    text = "".join(event.text for event in events)
    word = text.split()[3]
    engine = Engine(model, tokenizer)
    heard = answer(engine, Request(prompt=tuple(prompt), params=params))
    assert heard.text(0) == text
    assert heard.last(0).reason is events[-1].reason
    stopped = answer(engine, Request(prompt=tuple(prompt), params=GenerationParams(max_tokens=24, stop=(word,))))
    assert stopped.text(0) == text[: text.index(word)]
    assert stopped.last(0).reason is FinishReason.STOP
    engine.close()


def test_stop_tokens_end_an_answer_but_not_before_the_least_length(model, tokenizer):
    prompt = tuple(tokenizer.encode(TEXT[:60]))
    engine = Engine(model, tokenizer)
    free = answer(engine, Request(prompt=prompt, params=GenerationParams(max_tokens=8))).tokens(0)
    ends = GenerationParams(max_tokens=8, stop_token_ids=(free[2],))
    heard = answer(engine, Request(prompt=prompt, params=ends))
    assert heard.tokens(0) == free[: free.index(free[2]) + 1]
    assert heard.text(0) == tokenizer.decode(free[: free.index(free[2])])
    assert heard.last(0).reason is FinishReason.STOP
    later = GenerationParams(max_tokens=8, stop_token_ids=(free[2],), min_tokens=6)
    tokens = answer(engine, Request(prompt=prompt, params=later)).tokens(0)
    assert len(tokens) >= 6
    assert free[2] not in tokens[:6]
    engine.close()


def test_scores_are_those_of_the_logits(model, tokenizer):
    prompt = tokenizer.encode(TEXT)[:70]
    sequence = model.cache.take()
    rows = [model.extend(sequence, prompt[start : start + 35], phase=Phase.PREFILL, logits_of=range(35))
            for start in (0, 35)]  # fmt: skip
    logits = np.concatenate(rows)
    model.cache.give_back(sequence)
    engine = Engine(model, tokenizer)
    params = GenerationParams(max_tokens=2, sampling=Sampling(temperature=1.0, seed=3))
    heard = answer(engine, Request(prompt=tuple(prompt), params=params, logprobs=3, prompt_logprobs=True))
    scores, first = heard.events[0][:2]
    assert isinstance(scores, PromptScores)
    assert scores.logprobs[0] is None
    assert np.allclose(scores.logprobs[1:], log_probabilities(logits[:-1], prompt[1:]), atol=1e-12)
    assert scores.top[0] == ()
    for row, top in zip(logits[:-1], scores.top[1:], strict=True):
        assert [token for token, _ in top] == np.argsort(-row, kind="stable")[:3].tolist()
    assert first.logprob == pytest.approx(log_probabilities(logits[-1:], [first.token])[0])
    assert len(first.top) == 3
    none = answer(engine, Request(prompt=tuple(prompt), params=params)).events[0][0]
    assert (none.token, none.logprob, none.top) == (first.token, None, ())
    only = answer(engine, Request(prompt=tuple(prompt), params=GenerationParams(max_tokens=0), prompt_logprobs=True))
    assert only.events[0][0].logprobs == scores.logprobs
    assert (only.last(0).reason, only.tokens(0)) == (FinishReason.LENGTH, [])
    engine.close()


class Spells:
    """Allows one text, token by token, and breaks where it is told to."""

    def __init__(self, tokens, vocabulary, *, broken_at=None):
        self.left, self.vocabulary, self.broken_at = list(tokens), vocabulary, broken_at

    def mask(self):
        if self.broken_at == len(self.left):
            raise RuntimeError("the grammar is broken")
        allowed = np.zeros(self.vocabulary, bool)
        allowed[self.left[:1]] = True
        return allowed

    def advance(self, token):
        assert token == self.left.pop(0)

    @property
    def finished(self):
        return not self.left


def test_a_constraint_decides_and_one_that_breaks_harms_nobody_else(model, tokenizer):
    engine, heard, words = Engine(model, tokenizer), Heard(), tokenizer.encode("river and mountain")
    prompt, params = tuple(tokenizer.encode(TEXT[:30])), GenerationParams(max_tokens=10)
    size = model.config.vocab_size
    free = answer(engine, Request(prompt=prompt, params=params)).tokens(0)
    for key, constraint in {
        "spells": Spells(words, size),
        "breaks": Spells(words, size, broken_at=1),
        "free": None,
    }.items():
        engine.submit(Request(prompt=prompt, params=params, constraint=constraint), heard.sink(key))
    heard.wait(3)
    assert heard.tokens("spells") == words
    assert heard.last("spells").reason is FinishReason.STOP
    assert heard.tokens("breaks") == words[:-1]
    assert heard.last("breaks").reason is FinishReason.ERROR
    assert "the grammar is broken" in heard.last("breaks").error.message
    assert heard.tokens("free") == free
    engine.close()


def test_usage_and_counters_tell_what_was_done(model, tokenizer):
    prompt, reports = tuple(tokenizer.encode(TEXT)[:66]), []
    engine = Engine(model, tokenizer, on_step=reports.append)
    before = model.experts_chosen
    params = GenerationParams(max_tokens=4, ignore_eos=True)
    usages = [answer(engine, Request(prompt=prompt, params=params)).last(0).usage for _ in range(2)]
    assert [usage.cached_tokens for usage in usages][-1] == PAGE
    for usage in usages:
        assert (usage.prompt_tokens, usage.completion_tokens) == (66, 4)
        assert 0 < usage.time_to_first_token_seconds < usage.seconds
        assert 0 <= usage.queue_seconds <= usage.time_to_first_token_seconds
        assert usage.compute_seconds > 0
    assert sum(sum(usage.experts.values()) for usage in usages) == model.experts_chosen - before
    stats = engine.stats()
    assert (stats.requests, stats.prompt_tokens, stats.completion_tokens) == (2, 132, 8)
    assert stats.finished["length"] == sum(stats.finished.values()) == 2
    assert stats.rows == sum(report.rows for report in reports) == 132 - stats.reused_tokens + 6
    assert stats.steps == len(reports)
    assert sum(report.prompt_rows for report in reports) == 132 - stats.reused_tokens
    assert stats.cached_pages > 0
    engine.close()


def test_what_can_never_be_done_is_refused_at_once(model, tokenizer):
    engine, plain = Engine(model, tokenizer), GenerationParams()
    wrong = [
        ({"prompt": ()}, UsageError, "no tokens"),
        ({"prompt": (1,) * CONTEXT}, LimitExceeded, "160 tokens"),
        ({"prompt": (1, 1 << 20)}, LimitExceeded, "token id 1048576"),
        ({"params": GenerationParams(max_tokens=-1)}, UsageError, "max_tokens -1"),
        ({"params": GenerationParams(stop_token_ids=(-3,))}, LimitExceeded, "stop token -3"),
        ({"params": GenerationParams(sampling=Sampling(logit_bias=((1 << 20, 1.0),)))}, LimitExceeded, "logit bias"),
        ({"logprobs": 21}, UsageError, "logprobs 21"),
        ({"deadline_seconds": 0.0}, UsageError, "deadline"),
    ]
    for change, error, message in wrong:
        with pytest.raises(error, match=message):
            engine.submit(Request(**({"prompt": (1,), "params": plain} | change)), lambda _: None)
    assert engine.stats().requests == 0
    engine.close()
    with pytest.raises(TierdError, match="closed"):
        engine.submit(Request(prompt=(1,), params=plain), lambda _: None)
    engine = Engine(model, None)
    with pytest.raises(UsageError, match="tokenizer"):
        engine.submit(Request(prompt=(1,), params=GenerationParams(stop=("x",))), lambda _: None)
    engine.close()


def test_an_idle_engine_uses_no_processor(model, tokenizer):
    engine = Engine(model, tokenizer)
    answer(engine, Request(prompt=(5, 6, 7), params=GenerationParams(max_tokens=2)))
    clock = time.pthread_getcpuclockid(engine._thread.ident)
    while not engine._condition._waiters:
        time.sleep(0.001)
    before = time.clock_gettime(clock)
    time.sleep(0.2)
    assert time.clock_gettime(clock) - before < 1e-3
    engine.close()
    assert not engine._thread.is_alive()
