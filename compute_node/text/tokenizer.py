"""The checkpoint's own tokenizer.json, through the `tokenizers` library."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from typing import Final

import tokenizers

from compute_node.text.stream_decoder import StreamDecoder, token_bytes
from tierd.client.source import StoreView
from tierd.errors import UnsupportedModel, UsageError

__all__ = ["Tokenizer"]

FILE = "tokenizer.json"

_MANY_CHARACTERS: Final = 8
"""Of a token, on average over a long text: more is rare, and never seen where people write."""
_LEAST_PIECE: Final = 4096


class Tokenizer:
    """Text to token ids and back.

    Args:
        content: of tokenizer.json.

    Raises:
        UnsupportedModel: the library cannot read it, or its decoder is not known.
    """

    def __init__(self, content: bytes) -> None:
        try:
            text = content.decode()
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
            # Left by those who published it: texts are encoded whole, and nothing else.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            decoder = json.loads(text).get("decoder")
        except Exception as error:  # noqa: BLE001  (the library raises plain Exception, with a message of its own)
            raise UnsupportedModel(f"{FILE} cannot be read: {error}") from None
        self._bytes_of = token_bytes(decoder)
        steps = [] if decoder is None else decoder.get("decoders", [decoder])
        self._strips = any(step.get("type") in ("Strip", "Metaspace") for step in steps)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {token_id for token_id, token in added.items() if token.special}
        self._pieces: dict[int, bytes | None] = {}

    @classmethod
    def from_store(cls, store: StoreView) -> Tokenizer | None:
        """The tokenizer of a store; None if it has none."""
        if not any(file.name == FILE for file in store.manifest.files):
            return None
        return cls(store.read_file(FILE))

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added ones included."""
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            text: any Unicode text.
            special_tokens: add what the tokenizer puts around a text, such as a token for its beginning. A rendered
                chat template has them already.

        Raises:
            UsageError: the text holds a lone surrogate, which is no character.
        """
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=special_tokens).ids)
        except TypeError:
            raise UsageError("the text holds a lone surrogate (U+D800 to U+DFFF), which is no character") from None

    def surely_longer(self, text: str, tokens: int) -> bool:
        """Whether a text has more than so many tokens, told without encoding all of one that is far longer.

        A text is encoded in one call, which takes seconds for megabytes and which nothing can end. So of a text of
        many characters pieces are encoded first, until they have twice the tokens that are asked about: a cut changes
        but a few tokens beside it.

        Args:
            text: any Unicode text.
            tokens: at least 1.

        Raises:
            UsageError: the text holds a lone surrogate, which is no character.
        """
        if len(text) <= _MANY_CHARACTERS * tokens:
            return False
        size, found = max(tokens, _LEAST_PIECE), 0
        for start in range(0, len(text), size):
            found += len(self.encode(text[start : start + size], special_tokens=False))
            if found > 2 * tokens:
                return True
        return False

    def decode(self, token_ids: list[int], *, skip_special: bool = True) -> str:
        """Text of token ids; invalid bytes become U+FFFD."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special))

    def stream(self, *, continues: bool = False, shown: frozenset[int] = frozenset()) -> StreamDecoder:
        """A decoder for text that comes token by token; special tokens are not shown.

        Args:
            continues: the tokens continue a text (a prompt), so that a space at their beginning counts.
            shown: special tokens that are shown nevertheless, since a parser looks for them.
        """
        pieces = partial(self._shown_piece, shown) if shown else self._piece
        return StreamDecoder(pieces, strip_leading_space=self._strips and not continues)

    def bytes_of(self, token_id: int) -> bytes:
        """Bytes of any token, special ones as they are written; empty for ids outside the vocabulary."""
        piece = self._piece(token_id)
        if piece is None and (token := self._tokenizer.id_to_token(token_id)) is not None:
            return token.encode()
        return piece or b""

    def special_among(self, texts: Iterable[str]) -> frozenset[int]:
        """Which of these texts are special tokens of the vocabulary."""
        ids = (self._tokenizer.token_to_id(text) for text in texts)
        return frozenset(token_id for token_id in ids if token_id in self._special)

    def token_id(self, text: str) -> int | None:
        """The token that is exactly this text, special or not."""
        return self._tokenizer.token_to_id(text)

    def is_special(self, token_id: int) -> bool:
        """Whether a token is not part of any text."""
        return token_id in self._special

    def _piece(self, token_id: int) -> bytes | None:
        """Bytes of a token; None for special tokens and ids outside the vocabulary, which have no text."""
        if token_id not in self._pieces:
            token = None if token_id in self._special else self._tokenizer.id_to_token(token_id)
            self._pieces[token_id] = None if token is None else self._bytes_of(token)
        return self._pieces[token_id]

    def _shown_piece(self, shown: frozenset[int], token_id: int) -> bytes | None:
        return self.bytes_of(token_id) if token_id in shown else self._piece(token_id)
