"""Raw tiktoken vocabularies: the same ids as by tiktoken's own rule, and what is no vocabulary is refused."""

from __future__ import annotations

import base64
import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compute_node.text.tokenizer import Tokenizer
from tierd.checkpoint.source import read_texts
from tierd.checkpoint.tiktoken import tokenizer_json
from tierd.errors import StoreDamaged, UnsupportedModel

WORDS = [
    b" t", b"he", b" the", b"an", b" and", b"in", b"ing", b"'s", b"12", b"123", b"  ", b"\n\n", "é".encode(),
    "漢".encode()[:2], "漢".encode(), "漢字".encode(), b"re", b"er", b"ere", b" there", b"Th", b"The",
]  # fmt: skip
TOKENS = [bytes([byte]) for byte in range(256)] + WORDS
KIMI = {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}
SPECIAL = {str(len(TOKENS) + at): {"content": text, "special": True} for at, text in enumerate(("[BOS]", "<|im_end|>"))}


def ranks(tokens=TOKENS):
    return b"".join(base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(tokens))


def joined(piece):
    """tiktoken's rule, word for word: join the neighbours whose bytes together have the lowest rank."""
    known = {token: rank for rank, token in enumerate(TOKENS)}
    if piece in known:
        return [known[piece]]
    parts = [bytes([byte]) for byte in piece]
    while True:
        pairs = [(known[a + b], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in known]
        if not pairs:
            return [known[part] for part in parts]
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(tokenizer_json(ranks(), KIMI | {"added_tokens_decoder": SPECIAL}))


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("The there there's", ["The", " there", " there's"]),
        ("in 12345 é", ["in", " ", "123", "45", " é"]),
        ("漢字and漢", ["漢字", "and", "漢"]),
        ("a\n\n  b  ", ["a", "\n\n", " ", " b", "  "]),
        ("heHEhe!?\n.", ["he", "HEhe", "!?\n", "."]),
    ],
)
def test_texts_are_cut_and_joined_as_kimi_does(tokenizer, text, pieces):
    assert "".join(pieces) == text
    assert tokenizer.encode(text) == [token for piece in pieces for token in joined(piece.encode())]
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text(alphabet="the rand'sing12 \n漢字é", max_size=30))
@settings(deadline=None)
def test_every_text_comes_back(text):
    tokenizer = Tokenizer(tokenizer_json(ranks(), KIMI))
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.lists(st.sampled_from(b"thereinga"), min_size=1, max_size=12).map(bytes))
@settings(deadline=None)
def test_a_word_is_joined_by_the_lowest_rank_first(word):
    tokenizer = Tokenizer(tokenizer_json(ranks(), KIMI))
    assert tokenizer.encode(word.decode()) == joined(word)


def test_special_tokens_have_the_ids_of_the_settings(tokenizer):
    assert tokenizer.encode("[BOS]the<|im_end|>") == [len(TOKENS), *joined(b"the"), len(TOKENS) + 1]
    assert tokenizer.is_special(len(TOKENS))


@pytest.mark.parametrize("named", [{}, {"auto_map": {"AutoTokenizer": ["tokenization_other.Fast", None]}}])
def test_code_that_is_not_known_is_refused_by_name(named):
    with pytest.raises(UnsupportedModel, match=r"AutoTokenizer: (None|.*tokenization_other)"):
        tokenizer_json(ranks(), named)


def test_a_conversion_takes_the_vocabulary_over_unless_there_is_a_tokenizer_already(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tiktoken.model").write_bytes(ranks())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(KIMI | {"added_tokens_decoder": SPECIAL}))
    made = Tokenizer(read_texts(tmp_path)["tokenizer.json"])
    assert made.encode("the[BOS]") == [*joined(b"the"), len(TOKENS)]
    (tmp_path / "tokenizer.json").write_text("its own")
    assert read_texts(tmp_path)["tokenizer.json"] == b"its own"
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(StoreDamaged, match=r"tokenizer_config\.json"):
        read_texts(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"aGk=",
        b"aGk= x\n",
        b"!!! 0\n",
        ranks(TOKENS[1:]),
        ranks([*TOKENS, b"he"]),
        ranks().replace(b" 9\n", b" 999\n"),
    ],
)
def test_a_file_that_is_no_vocabulary_is_refused(content):
    with pytest.raises(StoreDamaged, match=r"tiktoken\.model"):
        tokenizer_json(content, KIMI)


@pytest.mark.parametrize("entries", [[1], {"x": {"content": "a"}}, {"999": "a"}, {"5": {"content": "a"}}])
def test_special_tokens_that_are_none_are_refused(entries):
    with pytest.raises(StoreDamaged, match=r"tokenizer_config\.json"):
        tokenizer_json(ranks(), KIMI | {"added_tokens_decoder": entries})
