from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from compute_node import embedded
from compute_node.text.stream_decoder import token_bytes
from compute_node.text.tokenizer import Tokenizer
from tierd.errors import UnsupportedModel

SPECIAL = 256


def byte_level():
    """One token per byte, and one special token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Library(models.BPE(vocab={letter: place for place, letter in enumerate(letters)}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<|end|>"])
    return Tokenizer(library.to_str().encode())


def sentencepiece():
    """The layout of Llama's and Mixtral's tokenizers: space marks, and byte tokens for what has no token."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁漢"]
    library = Library(
        models.BPE(
            vocab={word: place for place, word in enumerate(words)},
            merges=[("▁", "a")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(library.to_str().encode()), {word: place for place, word in enumerate(words)}


BYTES = byte_level()
EMBEDDED = Tokenizer((embedded.path() / "tokenizer.json").read_bytes())


def streamed(tokenizer, token_ids, **how):
    stream = tokenizer.stream(**how)
    return [stream.push(token_id) for token_id in token_ids] + [stream.flush()]


class Counting(Tokenizer):
    """Counts the characters that are encoded."""

    read = 0

    def encode(self, text, **how):
        self.read += len(text)
        return super().encode(text, **how)


@pytest.mark.parametrize("text", ["a b ", "a", " ", "It was a fine morning. ", "漢字"])
def test_a_text_that_is_far_too_long_is_not_read_to_its_end(text):
    tokenizer = Counting((embedded.path() / "tokenizer.json").read_bytes())
    assert tokenizer.surely_longer(text * 1_000_000, 100)
    assert tokenizer.read < 100_000


@pytest.mark.parametrize("text", ["a b ", "a", " ", "It was a fine morning. ", "漢字"])
def test_no_text_that_fits_is_taken_for_one_that_is_too_long(text):
    whole = text * 5000
    tokens = len(EMBEDDED.encode(whole))
    assert not EMBEDDED.surely_longer(whole, tokens)
    assert EMBEDDED.surely_longer(whole, tokens // 1000)


def test_what_publishers_left_of_truncation_and_padding_does_nothing():
    library = Library.from_str((embedded.path() / "tokenizer.json").read_text())
    library.enable_truncation(4)
    library.enable_padding(length=64)
    text = "It was a fine morning, and the ladies were out."
    assert Tokenizer(library.to_str().encode()).encode(text) == EMBEDDED.encode(text)


def test_characters_are_held_until_all_their_bytes_are_there():
    token_ids = BYTES.encode("😀é漢")
    assert len(token_ids) == 4 + 2 + 3
    assert streamed(BYTES, token_ids) == ["", "", "", "😀", "", "é", "", "", "漢", ""]


def test_an_invalid_tail_is_shown_at_the_end():
    token_ids = BYTES.encode("é漢")[:-1]
    assert streamed(BYTES, token_ids) == ["", "é", "", "", "\ufffd"]


def test_a_replacement_character_of_the_text_itself_is_shown():
    assert "".join(streamed(BYTES, BYTES.encode("a\ufffdb"))) == "a\ufffdb"


@given(st.text(max_size=30))
def test_streaming_any_text_gives_the_text(text):
    for tokenizer in (BYTES, EMBEDDED):
        assert "".join(streamed(tokenizer, tokenizer.encode(text))) == text


@given(st.lists(st.integers(0, 255), max_size=30))
def test_streaming_any_bytes_gives_what_a_whole_decode_gives(token_ids):
    assert "".join(streamed(BYTES, token_ids)) == BYTES.decode(token_ids)


@given(st.lists(st.integers(0, 4095), max_size=20))
def test_streaming_the_embedded_vocabulary_gives_what_a_whole_decode_gives(token_ids):
    assert "".join(streamed(EMBEDDED, token_ids)) == EMBEDDED.decode(token_ids)


def test_special_tokens_are_not_shown():
    assert "".join(streamed(BYTES, [*BYTES.encode("a"), SPECIAL, *BYTES.encode("b")])) == "ab"
    assert BYTES.encode("<|end|>") == [SPECIAL]
    assert BYTES.decode([SPECIAL], skip_special=False) == "<|end|>"


def test_ids_outside_the_vocabulary_have_no_text():
    assert streamed(BYTES, [1 << 20]) == ["", ""]


def test_sentencepiece_marks_become_spaces_and_byte_tokens_characters():
    tokenizer, ids = sentencepiece()
    token_ids = [ids[word] for word in ("▁a", "▁漢", "b", "<0xC3>", "<0xA9>", "▁a")]
    assert streamed(tokenizer, token_ids) == ["a", " 漢", "b", "", "é", " a", ""]
    assert "".join(streamed(tokenizer, token_ids)) == tokenizer.decode(token_ids)


def test_a_continued_text_keeps_its_first_space():
    tokenizer, ids = sentencepiece()
    assert streamed(tokenizer, [ids["▁a"]], continues=True) == [" a", ""]


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "x"}, "content": " "}]},
    ],
)
def test_decoders_that_are_not_understood_are_refused(decoder):
    with pytest.raises(UnsupportedModel, match="decoder"):
        token_bytes(decoder)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", json.dumps({"model": 1}).encode()])
def test_a_broken_tokenizer_file_is_refused(content):
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.json"):
        Tokenizer(content)
