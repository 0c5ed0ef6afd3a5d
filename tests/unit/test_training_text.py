from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest

from compute_node.training.corpus import Corpus, held_out_text, train_tokenizer
from compute_node.training.text import build_text, documents, novels
from tierd.errors import StoreDamaged, UsageError

UTF8, MISSING = 0x8000, -1


def r_object(lines, *, kind=16, version=3):
    """One object of an R lazy-load database: a character vector in XDR, compressed, behind its length."""
    body = b"X\n" + struct.pack(">iii", version, 0x040200, 0x030500)
    if version == 3:
        body += struct.pack(">i", 5) + b"UTF-8"
    body += struct.pack(">ii", kind, len(lines))
    for line in lines:
        raw = b"" if line is None else line.encode()
        body += struct.pack(">ii", UTF8 | 9, MISSING if line is None else len(raw)) + raw
    return struct.pack(">i", len(body)) + zlib.compress(body)


LONG = ["Her £20,000 " * 10] * 900


def test_novels_are_the_long_character_vectors_in_file_order():
    database = r_object(LONG) + r_object(["short"]) + r_object(["x" * 60_000, None, "y" * 60_000])
    assert novels(database) == ["\n".join(LONG), "x" * 60_000 + "\n\n" + "y" * 60_000]


def test_the_older_serialisation_reads_the_same():
    assert novels(r_object(LONG, version=2)) == novels(r_object(LONG))


def test_other_objects_are_passed_over():
    assert novels(r_object(LONG, kind=19) + r_object(LONG)) == ["\n".join(LONG)]


def test_a_damaged_database_is_refused_with_the_place():
    with pytest.raises(StoreDamaged, match="byte 0"):
        novels(b"\0\0\0\1not zlib")
    cut = struct.pack(">i", 9) + zlib.compress(b"X\n\0\0\0\3")
    with pytest.raises(StoreDamaged, match="byte 0"):
        novels(cut)


def test_paragraphs_are_joined_and_verses_are_not(tmp_path):
    (tmp_path / "austen_0.txt").write_text("It was\na   truth\n\nThe end\n")
    (tmp_path / "kjv.txt").write_text("In the beginning\nAnd the earth\n")
    assert documents(tmp_path) == ["It was a truth\n\nThe end", "In the beginning\nAnd the earth"]


def test_a_folder_without_text_is_refused(tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(UsageError, match=r"no \*\.txt files"):
        documents(tmp_path)


def test_a_missing_package_is_named(tmp_path):
    with pytest.raises(UsageError, match="r-cran-janeaustenr") as caught:
        build_text(tmp_path, tmp_path / "text")
    assert "apt-get download" in caught.value.hint


def test_the_end_of_every_book_is_held_out(tmp_path):
    texts = ["abc " * 500, "xyz " * 500]
    path = tmp_path / "tokenizer.json"
    train_tokenizer(texts, 300, path)
    corpus = Corpus.encode(texts, path, context=4)
    assert np.count_nonzero(corpus.train == 0) == 2
    assert corpus.train[-1] == 0
    per_book = len(corpus.held_out) // 2
    assert 0 < per_book < 0.03 * len(corpus.train) / 2
    corpus.save(tmp_path / "tokens.npz")
    again = Corpus.load(tmp_path / "tokens.npz")
    assert np.array_equal(again.train, corpus.train)
    assert np.array_equal(again.held_out, corpus.held_out)


def test_the_held_out_text_is_the_end_of_every_book_and_nothing_that_was_trained_on(tmp_path):
    texts = [" ".join(f"first{n}" for n in range(500)), " ".join(f"second{n}" for n in range(500))]
    path = tmp_path / "tokenizer.json"
    train_tokenizer(texts, 300, path)
    first, second = held_out_text(texts, path).strip().split("\n\n")
    assert texts[0].endswith(first)
    assert texts[1].endswith(second)
    assert 0 < len(first) < 0.03 * len(texts[0])


def test_too_little_text_is_refused_with_how_much_is_needed(tmp_path):
    path = tmp_path / "tokenizer.json"
    train_tokenizer(["a few words"], 300, path)
    with pytest.raises(UsageError, match="too short") as caught:
        Corpus.encode(["a few words"], path, context=512)
    assert "25,650" in caught.value.hint


def test_a_damaged_token_file_is_refused(tmp_path):
    (tmp_path / "tokens.npz").write_bytes(b"PK\3\4 nothing of use")
    with pytest.raises(StoreDamaged, match=r"tokens\.npz"):
        Corpus.load(tmp_path / "tokens.npz")
