"""What was drawn, as OpenAI's completions and chat completions: whole, or in chunks."""

import array
import sys
from typing import Any

from msgspec import Struct

from plexrl.attach.openai.asked import Asked
from plexrl.attach.openai.words import Flow, Words
from plexrl.types.drawn import Drawn, Sequence

EMPTY = -99999.0  # a cell of a top-k table that holds nothing


class Prompt(Struct, frozen=True):
    """One prompt of a request: its tokens, its text, and its place (n choices each)."""

    tokens: list[int]
    text: str
    index: int


class Choice:
    """One answer as it grows. `take` what was drawn so far; `delta` and `whole` say it in OpenAI's words."""

    def __init__(self, asked: Asked, words: Words, prompt: Prompt, index: int):
        self._asked = asked
        self._words = words
        self._prompt = prompt
        self.index = index
        self._flow = Flow(words, asked.stops)
        self._tokens: list[int] = []
        self._sequence: Sequence | None = None
        self._told_text = self._told_tokens = 0
        self._opened = self._closed = False
        self.finish: str | None = None

    @property
    def drawn(self) -> int:
        """Tokens taken."""
        return len(self._tokens)

    def take(self, sequence: Sequence, ended: bool) -> bool:
        """The newest state of this answer. False when it is not the old one and more (it was drawn anew)."""
        tokens = ints(sequence.tokens)
        if tokens[: len(self._tokens)] != self._tokens:
            return False
        self._sequence = sequence
        fresh, self._tokens = tokens[len(self._tokens) :], tokens
        if self._asked.max_tokens != 0:
            self._flow.push(fresh)
        if ended and self.finish is None:
            self._flow.end()
            self.finish = "stop" if sequence.stopped or self._flow.cut else "length"
        return True

    def whole(self, drawn: Drawn) -> dict[str, Any]:
        """The choice of an answer that is not streamed."""
        text, count = self._flow.text, self._shown()
        if self._asked.chat:
            message = {"role": "assistant", "content": text, "refusal": None}
            return self._choice({"message": message}, self._chat_logprobs(0, count))
        logprobs = None if self._asked.top is None else self._completion_logprobs(0, count, drawn)
        return self._choice({"text": self._prompt.text + text if self._asked.echo else text}, logprobs)

    def delta(self, drawn: Drawn) -> dict[str, Any] | None:
        """What is new since the last one; None when nothing is. The last one tells how it ended."""
        if self._closed:
            return None
        text, count = self._flow.text[self._told_text :], self._shown()
        logprobs = None
        first = not self._opened
        if self._asked.top is not None and (count > self._told_tokens or (first and self._asked.echo)):
            if self._asked.chat:
                logprobs = self._chat_logprobs(self._told_tokens, count)
            else:
                logprobs = self._completion_logprobs(self._told_tokens, count, drawn if first else None)
        if not (text or logprobs or first or self.finish):
            return None
        self._told_text, self._told_tokens = len(self._flow.text), count
        self._opened, self._closed = True, self.finish is not None
        if self._asked.chat:
            said = ({"role": "assistant"} if first else {}) | ({"content": text} if text or first else {})
            return self._choice({"delta": said}, logprobs)
        return self._choice({"text": self._prompt.text + text if first and self._asked.echo else text}, logprobs)

    def _choice(self, said: dict[str, Any], logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {"index": self.index, **said, "logprobs": logprobs, "finish_reason": self.finish}

    def _shown(self) -> int:
        """Tokens whose text is shown; not the special one that ended it."""
        count = self._flow.shown()
        if self.finish == "stop" and count and self._words.special(self._tokens[count - 1]):
            count -= 1
        return count

    def _chat_logprobs(self, start: int, end: int) -> dict[str, Any] | None:
        if self._asked.top is None:
            return None
        values, rows = floats(self._sequence.logprobs), _rows(self._sequence)
        content = []
        for at in range(start, end):
            top = rows[at][: self._asked.top] if rows else []
            content.append(self._told(self._tokens[at], values[at]) | {"top_logprobs": [self._told(*x) for x in top]})
        return {"content": content, "refusal": None}

    def _told(self, token: int, logprob: float) -> dict[str, Any]:
        text, raw = self._words.piece(token)
        return {"token": text, "bytes": raw, "logprob": logprob}

    def _completion_logprobs(self, start: int, end: int, prompt: Drawn | None) -> dict[str, Any]:
        """prompt: what was found out about the prompt, when an echo begins here."""
        told: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        before = len(self._prompt.text) if self._asked.echo else 0
        if self._asked.echo and prompt is not None and prompt.prompt_logprobs:
            values = floats(prompt.prompt_logprobs)
            rows = _table(prompt.prompt_k, prompt.prompt_top_tokens, prompt.prompt_top_logprobs)
            flow = Flow(self._words, ())
            flow.push(self._prompt.tokens)
            for at, token in enumerate(self._prompt.tokens):
                value = None if at == 0 else values[at]
                self._add(told, token, value, rows[at] if rows and at else [], flow.offsets[at])
        rows, values = _rows(self._sequence), floats(self._sequence.logprobs)
        for at in range(start, end):
            offset = before + self._flow.offsets[at]
            self._add(told, self._tokens[at], values[at], rows[at] if rows else [], offset)
        if not self._asked.top:
            told["top_logprobs"] = None
        return told

    def _add(self, told: dict[str, list], token: int, logprob: float | None, row: list, offset: int) -> None:
        text, _ = self._words.piece(token)
        top = {self._words.piece(other)[0]: value for other, value in reversed(row[: self._asked.top])}
        told["tokens"].append(text)
        told["token_logprobs"].append(logprob)
        # The drawn one is told of too, as OpenAI does, so that there may be one more than was asked for.
        told["top_logprobs"].append(None if logprob is None else {**top, text: logprob})
        told["text_offset"].append(offset)


def usage(prompts: list[Prompt], choices: list[Choice]) -> dict[str, int]:
    """Tokens read and drawn; of n answers to one prompt the prompt counts once."""
    read, drawn = sum(len(prompt.tokens) for prompt in prompts), sum(choice.drawn for choice in choices)
    return {"prompt_tokens": read, "completion_tokens": drawn, "total_tokens": read + drawn}


def ints(raw: bytes) -> list[int]:
    """Little-endian int32."""
    return _numbers("i", raw)


def floats(raw: bytes) -> list[float]:
    """Little-endian float32."""
    return _numbers("f", raw)


def _numbers(kind: str, raw: bytes) -> list:
    values = array.array(kind, raw)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def _rows(sequence: Sequence) -> list[list[tuple[int, float]]]:
    return _table(sequence.k, sequence.top_tokens, sequence.top_logprobs)


def _table(k: int, tokens: bytes, logprobs: bytes) -> list[list[tuple[int, float]]]:
    """(token, logprob) of each position, the likeliest first."""
    if not k:
        return []
    cells = list(zip(ints(tokens), floats(logprobs), strict=True))
    rows = [cells[at : at + k] for at in range(0, len(cells), k)]
    return [[cell for cell in row if cell[1] > EMPTY] for row in rows]
