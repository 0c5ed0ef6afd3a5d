"""A raw tiktoken vocabulary as tokenizer.json: Kimi K2 is published with `tiktoken.model` and code, which is not run.

Such a file has one token a line: its bytes in base64, and its rank, which is its id. A text is cut by a regular
expression, and in each piece those neighbours are joined whose bytes together have the lowest rank. In tokenizer.json
joins are listed in the order in which they are preferred: every way to make a token of two others, by the token's rank,
is the same rule. The ids of special tokens follow those of the file and are named in tokenizer_config.json.
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import TYPE_CHECKING, Any, Final

from tierd.errors import StoreDamaged, UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["RANKS_FILE", "tokenizer_json"]

RANKS_FILE: Final = "tiktoken.model"

_LETTERS: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SMALL: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ENDING: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_KIMI: Final = "|".join((
    r"[\p{Han}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_LETTERS}*{_SMALL}+{_ENDING}",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_LETTERS}+{_SMALL}*{_ENDING}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
))  # fmt: skip
"""How Kimi's tokenizer cuts a text: runs of Han characters, words, up to three digits, punctuation, space."""

_PATTERNS: Final = {"tokenization_kimi": _KIMI}
"""By the module of the tokenizer's code that tokenizer_config.json names."""


def tokenizer_json(ranks: bytes, settings: Mapping[str, Any]) -> bytes:
    """The content of a tokenizer.json that gives the same ids.

    Args:
        ranks: content of `tiktoken.model`.
        settings: of tokenizer_config.json; its `auto_map` says whose code cuts a text, its `added_tokens_decoder` names
            the special tokens.

    Raises:
        UnsupportedModel: code whose expression is not known.
        StoreDamaged: a line or an entry that is not one.
    """
    named = settings.get("auto_map")
    code = str(named.get("AutoTokenizer") if isinstance(named, dict) else None)
    pattern = next((known for module, known in _PATTERNS.items() if f"{module}." in code), None)
    if pattern is None:
        raise UnsupportedModel(
            f"{RANKS_FILE}: how its code cuts a text is not known (auto_map.AutoTokenizer: {code[:100]})",
            hint="Put a tokenizer.json beside it, made by the model's own code.",
        )
    tokens = _read(ranks)
    known = {token: rank for rank, token in enumerate(tokens)}
    names = [_written(token) for token in tokens]
    merges = [[_written(token[:cut]), _written(token[cut:])] for token in tokens for cut in _cuts(token, known)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(_added(settings, len(tokens))),
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "ignore_merges": True,
            "vocab": {name: rank for rank, name in enumerate(names)},
            "merges": merges,
        },
    }
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


def _read(ranks: bytes) -> list[bytes]:
    """The tokens by rank."""
    found: dict[int, bytes] = {}
    for number, line in enumerate(ranks.splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            found[int(rank)] = base64.b64decode(token, validate=True)
        except (ValueError, binascii.Error):
            raise StoreDamaged(f"{RANKS_FILE}, line {number}: a token in base64 and its rank are expected") from None
    tokens = [found[rank] for rank in range(len(found)) if found.get(rank)]
    if (
        len(tokens) != len(found)
        or len(set(tokens)) != len(tokens)
        or not {bytes([b]) for b in range(256)} <= {*tokens}
    ):
        raise StoreDamaged(f"{RANKS_FILE}: ranks from 0 on, each with a token of its own, and all bytes are expected")
    return tokens


def _cuts(token: bytes, known: Mapping[bytes, int]) -> list[int]:
    """Where a token can be cut into two others, the way with the lowest ranks first."""
    cuts = [cut for cut in range(1, len(token)) if token[:cut] in known and token[cut:] in known]
    return sorted(cuts, key=lambda cut: (known[token[:cut]], known[token[cut:]]))


def _added(settings: Mapping[str, Any], first: int) -> Iterator[dict[str, Any]]:
    """Special tokens in order of their ids, which begin behind the vocabulary."""
    entries = settings.get("added_tokens_decoder", {})
    try:
        named = sorted(
            (int(number), entry["content"], bool(entry.get("special", True))) for number, entry in entries.items()
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        raise StoreDamaged("tokenizer_config.json: added_tokens_decoder is not a table of tokens by id") from None
    for number, text, special in named:
        if number < first or not isinstance(text, str):
            raise StoreDamaged(f"tokenizer_config.json: token {number} is inside the {first} tokens of {RANKS_FILE}")
        yield {
            "id": number, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": special,
        }  # fmt: skip


def _letters() -> str:
    """A printable character for each byte, as byte-level vocabularies write them (GPT-2)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return "".join(chr(byte) if byte in plain else chr(next(others)) for byte in range(256))


_LETTER: Final = _letters()


def _written(token: bytes) -> str:
    return "".join(_LETTER[byte] for byte in token)
