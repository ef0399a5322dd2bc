"""The answer to one request: what it asks the pool for, and what was drawn in OpenAI's words."""

import secrets
import time
from typing import Any

from plexrl.attach.openai.asked import Asked
from plexrl.attach.openai.choices import Choice, Prompt, usage
from plexrl.attach.openai.refusals import Refusal
from plexrl.attach.openai.words import Words
from plexrl.types.drawn import Drawn


class Answer:
    """One request's answer."""

    def __init__(self, asked: Asked, words: Words, version: str):
        """Renders and encodes the prompts. version: that draws, "" for a base model. Raises Refusal."""
        self.asked = asked
        self.prompts = _prompts(asked, words)
        self.choices = [
            Choice(asked, words, prompt, prompt.index * asked.n + at)
            for prompt in self.prompts
            for at in range(asked.n)
        ]
        self.headers = {"x-plexrl-version": version} if version else {}
        kind = "chat.completion" if asked.chat else "text_completion"
        self._envelope = {
            "id": f"{'chatcmpl' if asked.chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": f"{kind}.chunk" if asked.chat and asked.stream else kind,
            "created": int(time.time()),
            "model": asked.model,
        }

    def body(self, prompt: Prompt) -> dict[str, Any]:
        """Of asample."""
        asked = self.asked
        params: dict[str, Any] = {"temperature": asked.temperature, "top_p": asked.top_p, "top_k": asked.top_k}
        if asked.max_tokens is not None:
            params["max_tokens"] = max(asked.max_tokens, 1)
        if asked.seed is not None:
            # Prompts of one request differ in their seeds, as its answers do.
            params["seed"] = (asked.seed + prompt.index + 2**63) % 2**64 - 2**63
        if asked.stops:
            params["stop"] = list(asked.stops)
        told = {"topk_sample_logprobs": asked.top} if asked.top else {}
        if asked.echo and asked.top is not None:
            told |= {"prompt_logprobs": True, "topk_prompt_logprobs": asked.top}
        chunk = {"tokens": prompt.tokens, "type": "encoded_text"}
        return {"num_samples": asked.n, "prompt": {"chunks": [chunk]}, "sampling_params": params, **told}

    def whole(self, drawn: list[Drawn]) -> dict[str, Any]:
        """The answer that is not streamed; drawn: the end of each prompt's call."""
        choices = []
        for prompt, found in zip(self.prompts, drawn, strict=True):
            for choice, sequence in zip(self._of(prompt), found.sequences, strict=True):
                choice.take(sequence, True)
                choices.append(choice.whole(found))
        return self.envelope(choices) | {"usage": usage(self.prompts, self.choices)}

    def take(self, prompt: Prompt, drawn: Drawn) -> list[dict[str, Any]]:
        """Chunks for what is new of one prompt."""
        chunks = []
        for choice, sequence in zip(self._of(prompt), drawn.sequences, strict=False):
            if not choice.take(sequence, drawn.ended or sequence.stopped):
                raise Refusal(500, "What drew this answer was lost in the middle of it. Ask again", code="drawn_anew")
            if (told := choice.delta(drawn)) is not None:
                chunks.append(self.envelope([told]) | ({"usage": None} if self.asked.usage else {}))
        return chunks

    def last(self) -> dict[str, Any]:
        """The chunk that tells the usage."""
        return self.envelope([]) | {"usage": usage(self.prompts, self.choices)}

    def envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Around choices."""
        return self._envelope | {"choices": choices}

    def _of(self, prompt: Prompt) -> list[Choice]:
        return self.choices[prompt.index * self.asked.n : (prompt.index + 1) * self.asked.n]


def _prompts(asked: Asked, words: Words) -> list[Prompt]:
    """The prompts as tokens; their texts where they are shown again."""
    if asked.chat:
        text = words.template.render(asked.messages, asked.template)
        return [Prompt(words.encode(text, special=False), text, 0)]
    return [_prompt(given, index, asked, words) for index, given in enumerate(asked.prompts)]


def _prompt(given: str | list[int], index: int, asked: Asked, words: Words) -> Prompt:
    tokens = words.encode(given, special=True) if isinstance(given, str) else given
    if not tokens:
        raise Refusal(400, f"prompt {index} is empty. Give at least one token", "prompt", "invalid_value")
    text = given if isinstance(given, str) else words.decode(given) if asked.echo else ""
    return Prompt(tokens, text, index)
