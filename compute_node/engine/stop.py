"""When an answer ends: token ids that the checkpoint names, and strings that the user names."""

from __future__ import annotations

import json
from collections.abc import Sequence

from compute_node.models.config_reader import ConfigReader
from tierd.client.source import StoreView
from tierd.errors import UsageError

__all__ = ["MAX_STOP_STRINGS", "StopStrings", "stop_token_ids"]

MAX_STOP_STRINGS = 16
_MAX_STOP_CHARACTERS = 1024


def stop_token_ids(store: StoreView, config_ids: Sequence[int]) -> frozenset[int]:
    """Tokens that end an answer: those of generation_config.json if it names any, else those of config.json."""
    if any(file.name == "generation_config.json" for file in store.manifest.files):
        try:
            content = json.loads(store.read_file("generation_config.json"))
        except ValueError:
            content = None
        if isinstance(content, dict):
            ids = ConfigReader(content, "generation_config.json").token_ids("eos_token_id")
            if ids:
                return frozenset(ids)
    return frozenset(config_ids)


class StopStrings:
    """Lets text through until a stop string appears, even one that is spread over several pieces.

    Text that may turn out to be the beginning of a stop string is held back until that is decided.

    Args:
        strings: at most `MAX_STOP_STRINGS`, none empty.

    Raises:
        UsageError: too many, empty or overlong stop strings.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        if len(strings) > MAX_STOP_STRINGS:
            raise UsageError(f"{len(strings)} stop strings are more than {MAX_STOP_STRINGS}")
        for string in strings:
            if not 0 < len(string) <= _MAX_STOP_CHARACTERS:
                raise UsageError(f"a stop string of {len(string)} characters is outside 1 to {_MAX_STOP_CHARACTERS}")
        self._strings = tuple(strings)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that is certain to come before any stop string; sets `stopped` when one is complete."""
        if self.stopped:
            return ""
        if not self._strings:
            return text
        self._held += text
        places = [place for string in self._strings if (place := self._held.find(string)) >= 0]
        if places:
            self.stopped = True
            released, self._held = self._held[: min(places)], ""
            return released
        keep = max((_overlap(self._held, string) for string in self._strings), default=0)
        cut = len(self._held) - keep
        released, self._held = self._held[:cut], self._held[cut:]
        return released

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        released, self._held = self._held, ""
        return released


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of `text` with which `string` begins, short of all of it."""
    for length in range(min(len(text), len(string) - 1), 0, -1):
        if text.endswith(string[:length]):
            return length
    return 0
