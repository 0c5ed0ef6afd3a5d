"""Text from token ids as they come, without ever tearing a character apart.

A token of a byte-level vocabulary is a run of bytes, not of characters: one character of UTF-8 may be spread over
several tokens. Bytes are held until a character is whole; an invalid run becomes U+FFFD (Unicode 15, section 3.9,
substitution of maximal subparts), for byte-level vocabularies exactly as in a decode of the whole text.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from typing import Any, Final

from tierd.errors import UnsupportedModel

__all__ = ["StreamDecoder", "TokenBytes", "token_bytes"]

TokenBytes = Callable[[str], bytes]
"""The bytes that a token of the vocabulary stands for."""

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte, as GPT-2's tokenizer (Radford et al. 2019) chose them."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_ALPHABET: Final = _byte_level_alphabet()


def _from_byte_level(token: str) -> bytes:
    try:
        return bytes(_ALPHABET[character] for character in token)
    except KeyError:
        # An added token with characters outside the alphabet stands for itself.
        return token.encode()


def _from_sentencepiece(token: str) -> bytes:
    found = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(found[1], 16)]) if found else token.replace("\u2581", " ").encode()


def token_bytes(decoder: dict[str, Any] | None) -> TokenBytes:
    """How the tokens of a tokenizer.json become bytes.

    Args:
        decoder: the `decoder` object of tokenizer.json.

    Raises:
        UnsupportedModel: a decoder that is neither byte-level nor SentencePiece's.
    """
    steps = [] if decoder is None else decoder.get("decoders", [decoder])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return _from_byte_level
    known = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    replaces = [step for step in steps if step.get("type") == "Replace"]
    if kinds and set(kinds) <= known and all(_is_space_mark(step) for step in replaces):
        return _from_sentencepiece
    raise UnsupportedModel(f"tokenizer.json: the decoder {kinds} is not known")


def _is_space_mark(step: dict[str, Any]) -> bool:
    return step.get("pattern") == {"String": "\u2581"} and step.get("content") == " "


class StreamDecoder:
    """Decodes one text, token by token.

    Args:
        pieces: bytes of a token id; None for tokens that are not shown.
        strip_leading_space: drop one space at the very beginning, as SentencePiece's decoders do for a whole text.
    """

    def __init__(self, pieces: Callable[[int], bytes | None], *, strip_leading_space: bool) -> None:
        self._pieces = pieces
        self._strip = strip_leading_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The characters that this token completes; "" while a character is incomplete."""
        piece = self._pieces(token_id)
        if piece is None:
            return ""
        return self._shown(self._utf8.decode(piece))

    def flush(self) -> str:
        """What is left when no token follows: an incomplete character becomes U+FFFD."""
        return self._shown(self._utf8.decode(b"", final=True))

    def _shown(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text
