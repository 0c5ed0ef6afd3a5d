from __future__ import annotations

from pathlib import Path

import pytest

from compute_node import embedded
from compute_node.engine.generate import Finished, FinishReason, GenerationParams, Generator
from compute_node.engine.model import Model, ModelOptions
from compute_node.engine.sampler import Sampling
from compute_node.text.tokenizer import Tokenizer
from tierd.checkpoint.convert import convert
from tierd.client.in_process import InProcess
from tierd.errors import LimitExceeded, UsageError
from tierd.store.store import ExpertStore


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("embedded") / "store"
    convert(embedded.path(), Path(path), experts="int4-g64", dense="bf16")
    return ExpertStore.open(path)


@pytest.fixture(scope="module")
def model(store):
    with Model(InProcess(store), ModelOptions(threads=1, context=128, rows=16, sequences=2)) as model:
        yield model


@pytest.fixture(scope="module")
def tokenizer(store):
    return Tokenizer.from_store(store)


@pytest.fixture
def generator(model, tokenizer):
    return Generator(model, tokenizer)


PROMPT = "It was a fine morning, and the ladies"


def run(generator, prompt=PROMPT, *, max_tokens=12, **how):
    params = {name: how.pop(name) for name in ("sampling", "stop", "ignore_eos") if name in how}
    tokens = generator.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    events = list(generator.generate(tokens, GenerationParams(max_tokens=max_tokens, **params), **how))
    assert isinstance(events[-1], Finished)
    assert [event.token_id for event in events[:-1]] == list(events[-1].token_ids)
    return events[-1], "".join(event.text for event in events)


def test_text_is_what_the_tokens_say(generator):
    finished, text = run(generator, max_tokens=20)
    assert finished.reason is FinishReason.LENGTH
    assert len(finished.token_ids) == 20
    assert text == generator.tokenizer.decode(list(finished.token_ids))
    assert len(text) > 30


def test_the_same_request_gives_the_same_tokens(generator):
    sampling = Sampling(temperature=0.9, top_k=40, top_p=0.95, seed=11)
    first, _ = run(generator, sampling=sampling)
    second, _ = run(generator, sampling=sampling)
    third, _ = run(generator, sampling=Sampling(temperature=0.9, top_k=40, top_p=0.95, seed=12))
    assert first.token_ids == second.token_ids != third.token_ids


def test_a_draw_depends_on_position_and_not_on_the_tokens_before_it(generator):
    """Continuing from half of an answer gives the other half."""
    sampling = Sampling(temperature=1.0, seed=5)
    whole, _ = run(generator, sampling=sampling)
    prompt = [*generator.tokenizer.encode(PROMPT), *whole.token_ids[:5]]
    rest, _ = run(generator, prompt, max_tokens=7, sampling=sampling)
    assert rest.token_ids == whole.token_ids[5:]


def test_a_stop_string_ends_the_answer_and_the_work(generator, model):
    _, text = run(generator, max_tokens=40)
    stop = text.split()[4]
    steps = model.times.steps
    finished, stopped = run(generator, max_tokens=40, stop=(stop,))
    assert finished.reason is FinishReason.STOP
    assert stopped == text[: text.index(stop)]
    assert model.times.steps - steps == 1 + len(finished.token_ids) - 1 < 40


def test_an_end_of_text_token_ends_the_answer_without_being_text(generator, monkeypatch):
    free, _ = run(generator)
    monkeypatch.setattr(generator, "stop_tokens", frozenset({free.token_ids[3]}))
    finished, text = run(generator)
    assert finished.reason is FinishReason.STOP
    first = free.token_ids.index(free.token_ids[3])
    assert finished.token_ids == free.token_ids[: first + 1]
    assert text == generator.tokenizer.decode(list(free.token_ids[:first]))
    ignored, _ = run(generator, ignore_eos=True)
    assert ignored.token_ids == free.token_ids


def test_the_checkpoint_names_its_end_of_text_token(generator):
    assert generator.stop_tokens == {0}


def test_a_large_wish_is_cut_to_the_context(generator):
    prompt = list(range(3, 123))
    finished, _ = run(generator, prompt, max_tokens=1_000_000, ignore_eos=True)
    assert finished.reason is FinishReason.LENGTH
    assert len(finished.token_ids) == 8


def test_a_prompt_that_does_not_fit_is_refused_at_once(generator):
    with pytest.raises(LimitExceeded, match="128 tokens"):
        generator.generate([1] * 128, GenerationParams())
    with pytest.raises(UsageError, match="no tokens"):
        generator.generate([], GenerationParams())
    with pytest.raises(UsageError, match="max-tokens"):
        generator.generate([1], GenerationParams(max_tokens=0))


def test_stop_strings_need_a_tokenizer(model):
    with pytest.raises(UsageError, match="tokenizer"):
        Generator(model, None).generate([1], GenerationParams(stop=("x",)))


def test_without_a_tokenizer_there_are_tokens_but_no_text(model, generator):
    tokens = generator.tokenizer.encode(PROMPT)
    events = list(Generator(model, None).generate(tokens, GenerationParams(max_tokens=3)))
    assert events[-1].token_ids == run(generator, max_tokens=3)[0].token_ids
    assert {event.text for event in events} == {""}


@pytest.mark.parametrize("when", [0, 3, 20])
def test_cancelling_ends_in_every_phase(generator, model, when):
    """`when` questions after the beginning: in the prompt, or between tokens."""
    asked = []

    def cancelled():
        asked.append(model.source.stats.visits)
        return len(asked) > when

    before = model.source.stats.visits
    finished, _ = run(generator, "one two three " * 12, max_tokens=50, cancelled=cancelled)
    assert finished.reason is FinishReason.CANCELLED
    assert model.source.stats.visits - before <= when * model.config.layers
    assert model.cache.open_places == 2


def test_a_conversation_computes_only_what_is_new(generator, model):
    sequence = model.cache.take()
    prompt = generator.tokenizer.encode(PROMPT)
    first, _ = run(generator, prompt, sequence=sequence)
    longer = [*prompt, *first.token_ids, 30, 31, 32]
    reused, _ = run(generator, longer, sequence=sequence)
    fresh, _ = run(generator, longer)
    assert reused.reused_tokens == len(prompt) + len(first.token_ids) - 1
    assert fresh.reused_tokens == 0
    assert reused.token_ids == fresh.token_ids
    changed = [*prompt[:4], 50, 51]
    assert run(generator, changed, sequence=sequence)[0].reused_tokens == 4
    again, _ = run(generator, changed, sequence=sequence)
    assert again.reused_tokens == len(changed) - 1
    assert again.token_ids == run(generator, changed)[0].token_ids
    model.cache.give_back(sequence)


def test_an_abandoned_answer_gives_its_place_back(generator, model):
    for _ in range(5):
        answer = generator.generate(generator.tokenizer.encode(PROMPT), GenerationParams())
        next(answer)
        answer.close()
    assert model.cache.open_places == 2


def test_figures_add_up(generator, model):
    source = model.source
    requested, waited = source.stats.requested, source.stats.wait_seconds
    finished, _ = run(generator)
    assert finished.experts_chosen == source.stats.requested - requested > 0
    assert finished.wait_seconds == pytest.approx(source.stats.wait_seconds - waited)
    assert 0 < finished.time_to_first_token_seconds < finished.seconds
    assert finished.compute_seconds + finished.wait_seconds <= finished.seconds
    assert finished.decode.seconds < finished.seconds
    assert finished.tokens_per_second == pytest.approx(11 / finished.decode.seconds)
    assert finished.prompt_tokens == len(generator.tokenizer.encode(PROMPT))
