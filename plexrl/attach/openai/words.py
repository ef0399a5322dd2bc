"""A model folder's tokenizer: texts to tokens, and tokens back to texts as they come."""

import json
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from plexrl.attach.openai.refusals import Refusal
from plexrl.attach.openai.template import Template

_PART = "\ufffd"  # what a decoder shows for bytes that are no whole character yet


class Words:
    """Tokenizer and chat template of one folder. May be used by several threads."""

    def __init__(self, folder: Path):
        """Raises Refusal (500) when the folder cannot be used here."""
        try:
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            config = _config(folder / "tokenizer_config.json")
        except Exception as error:
            raise Refusal(
                500,
                f"The tokenizer in {folder} cannot be read on this node: {error}. The pool's admin must keep the model "
                "folder, with a tokenizer.json, where jobs can read it",
            ) from error
        self.template = Template(folder, config)
        self._special = frozenset(
            token for token, added in self._tokenizer.get_added_tokens_decoder().items() if added.special
        )
        self._letters = {letter: byte for byte, letter in alphabet().items()} if _byte_level(self._tokenizer) else {}

    def encode(self, text: str, special: bool) -> list[int]:
        """special: with what the tokenizer puts around a text (a chat template has written it already)."""
        return self._tokenizer.encode(text, add_special_tokens=special).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Without special tokens."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def special(self, token: int) -> bool:
        """Whether a token is no part of a text."""
        return token in self._special

    def piece(self, token: int) -> tuple[str, list[int]]:
        """One token as text and as bytes; the text of a part of a character is a mark."""
        written = self._tokenizer.id_to_token(token)
        if written is None:
            return "", []
        if token in self._special:
            return written, list(written.encode())
        if self._letters and all(letter in self._letters for letter in written):
            raw = bytes(self._letters[letter] for letter in written)
            return raw.decode("utf-8", "replace"), list(raw)
        if len(written) == 6 and written.startswith("<0x") and written.endswith(">"):
            raw = bytes([int(written[3:5], 16)])
            return raw.decode("utf-8", "replace"), list(raw)
        text = written.replace("\u2581", " ")
        return text, list(text.encode())


class Flow:
    """The text of one answer, token by token. stops: texts that end it and are no part of it."""

    def __init__(self, words: Words, stops: tuple[str, ...]):
        self._words = words
        self._stops = stops
        self._tokens: list[int] = []
        self._from = self._read = 0
        self._raw = ""
        self._ended = False
        self.offsets: list[int] = []
        """For each token where in the text it begins; of parts of a character all at the same place."""
        self.text = ""
        """What will not change any more."""
        self.cut = False
        """Whether a stop ended it."""

    def push(self, tokens: Sequence[int]) -> None:
        """More tokens, in order."""
        for token in tokens:
            self.offsets.append(len(self._raw))
            if self.cut:
                continue
            self._tokens.append(token)
            before = self._words.decode(self._tokens[self._from : self._read])
            now = self._words.decode(self._tokens[self._from :])
            if len(now) > len(before) and not now.endswith(_PART):
                self._take(now[len(before) :])
                self._from, self._read = self._read, len(self._tokens)

    def end(self) -> None:
        """No more tokens come: what was held back is text."""
        if not self.cut:
            before = self._words.decode(self._tokens[self._from : self._read])
            self._take(self._words.decode(self._tokens[self._from :])[len(before) :])
        if not self.cut:
            self.text = self._raw
        self._ended = True

    def shown(self) -> int:
        """How many of the tokens begin within the text; of a text that no stop cut, at its end all."""
        if self._ended and not self.cut:
            return len(self.offsets)
        return bisect_left(self.offsets, len(self.text))

    def _take(self, more: str) -> None:
        searched = max(0, len(self._raw) - max(map(len, self._stops), default=1) + 1)
        self._raw += more
        found = [at for stop in self._stops if (at := self._raw.find(stop, searched)) >= 0]
        if found:
            self.cut = True
            self.text = self._raw[: min(found)]
        else:
            self.text = self._raw[: len(self._raw) - self._held()]

    def _held(self) -> int:
        """Characters at the end that may be the beginning of a stop."""
        longest = min(max(map(len, self._stops), default=1) - 1, len(self._raw))
        for size in range(longest, 0, -1):
            if any(stop.startswith(self._raw[-size:]) for stop in self._stops):
                return size
        return 0


def _config(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _byte_level(tokenizer: Tokenizer) -> bool:
    """Whether its tokens are written in the alphabet of byte-level BPE."""
    return "ByteLevel" in repr(tokenizer.decoder)


def alphabet() -> dict[int, str]:
    """The letter that stands for each byte: printable ones for themselves, the others by the letters from U+0100."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in plain}
    for byte in range(256):
        if byte not in letters:
            letters[byte] = chr(256 + len(letters) - len(plain))
    return letters
