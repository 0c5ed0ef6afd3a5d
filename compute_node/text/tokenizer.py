"""The checkpoint's own tokenizer.json, through the `tokenizers` library."""

from __future__ import annotations

import json

import tokenizers

from compute_node.text.stream_decoder import StreamDecoder, token_bytes
from tierd.client.source import StoreView
from tierd.errors import UnsupportedModel

__all__ = ["Tokenizer"]

FILE = "tokenizer.json"


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
        """
        return list(self._tokenizer.encode(text, add_special_tokens=special_tokens).ids)

    def decode(self, token_ids: list[int], *, skip_special: bool = True) -> str:
        """Text of token ids; invalid bytes become U+FFFD."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special))

    def stream(self, *, continues: bool = False) -> StreamDecoder:
        """A decoder for text that comes token by token; special tokens are not shown.

        Args:
            continues: the tokens continue a text (a prompt), so that a space at their beginning counts.
        """
        return StreamDecoder(self._piece, strip_leading_space=self._strips and not continues)

    def _piece(self, token_id: int) -> bytes | None:
        """Bytes of a token; None for special tokens and ids outside the vocabulary, which have no text."""
        if token_id not in self._pieces:
            token = None if token_id in self._special else self._tokenizer.id_to_token(token_id)
            self._pieces[token_id] = None if token is None else self._bytes_of(token)
        return self._pieces[token_id]
