"""An asample request: what is asked for, checked, and its answer."""

from __future__ import annotations

import json
import math

import msgspec
import numpy as np
import torch
from msgspec import Struct
from tinker.proto import tinker_public_pb2 as pb

from plexrl.engines.protocol import UserError
from plexrl.engines.torch.crossing import Tally
from plexrl.types import Result

_NOT_BUILT = ("target_prompt_logprobs", "prompt_alt_tokens_k", "prompt_logprobs_last_n")
PROTO = "application/x-protobuf"
EMPTY = -99999.0  # the client's mark for a cell of a top-k table that holds nothing


class Limits(Struct, frozen=True):
    """What a model can take. eos: token ids that end a sequence by default. tokens: KV tokens for one sequence."""

    vocabulary: int
    max_context: int
    tokens: int
    eos: frozenset[int]


class Params(Struct, frozen=True):
    """How to draw. temperature 0: the likeliest token. top_k 0: no limit. stop_*: what ends a sequence."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int | None
    stop_tokens: frozenset[int]
    stop_strings: tuple[str, ...]

    @property
    def plain(self) -> bool:
        """Drawn from the softmax of the logits as they are."""
        return self.temperature == 1 and self.top_k == 0 and self.top_p == 1


class Sequence:
    """One answer being drawn. row: its place in the KV table, None while it waits."""

    def __init__(self, request: Request, index: int) -> None:
        self.request = request
        self.row: int | None = None
        self.cached = 0  # tokens whose keys and values are in the row
        self.parked = 0  # of these, the first ones that host memory has too, at the row's place
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.top: list[tuple[np.ndarray, np.ndarray]] = []
        self.stopped = False
        self.generator = torch.Generator()
        if request.params.seed is None:
            self.generator.seed()
        else:
            # Samples of one request differ; a large odd factor keeps neighbouring seeds' samples apart.
            self.generator.manual_seed((request.params.seed * 0x9E3779B1 + index) % 2**63)

    @property
    def ended(self) -> bool:
        """Whether the last token was the last one."""
        return self.stopped or len(self.tokens) >= self.request.params.max_tokens

    @property
    def prefix(self) -> np.ndarray:
        """What its row must hold before the next token is drawn or decoded: the newest token's keys come with it."""
        return np.concatenate([self.request.prompt, np.asarray(self.tokens[:-1], np.int64)])


class Drawn(Struct, frozen=True):
    """A sequence as another replica goes on with it. tokens, top's ids: int32; logprobs, top's values: float32."""

    tokens: bytes
    logprobs: bytes
    top: tuple[tuple[bytes, bytes], ...]
    stopped: bool
    generator: bytes


class Request:
    """A call: its prompt, its sequences, and what was computed once for all of them."""

    def __init__(self, call_id: str, version: str | None, asked: Asked) -> None:
        self.call_id = call_id
        self.version = version
        self.prompt = asked.prompt
        self.params = asked.params
        self.asked = asked
        self.need = len(asked.prompt) + asked.params.max_tokens - 1  # the last token's keys are never used
        self.sequences = [Sequence(self, index) for index in range(asked.num_samples)]
        self.first: torch.Tensor | None = None  # logits after the prompt
        self.prompt_logprobs: np.ndarray | None = None
        self.prompt_top: list[tuple[np.ndarray, np.ndarray]] = []
        self.cpu_ns = 0.0
        self.tally = Tally()

    @property
    def ended(self) -> bool:
        """Whether every sequence has ended."""
        return all(sequence.ended for sequence in self.sequences)

    def pack(self) -> bytes:
        """What was drawn so far, for another replica."""
        sequences = [
            Drawn(
                tokens=np.asarray(sequence.tokens, "<i4").tobytes(),
                logprobs=np.asarray(sequence.logprobs, "<f4").tobytes(),
                top=tuple((i.astype("<i4").tobytes(), v.astype("<f4").tobytes()) for i, v in sequence.top),
                stopped=sequence.stopped,
                generator=sequence.generator.get_state().numpy().tobytes(),
            )
            for sequence in self.sequences
        ]
        return msgspec.msgpack.encode(sequences)

    def unpack(self, drawn: bytes) -> None:
        """Go on where another replica stopped; for a request of the same body that has drawn nothing."""
        for sequence, found in zip(self.sequences, msgspec.msgpack.decode(drawn, type=list[Drawn]), strict=True):
            sequence.tokens = np.frombuffer(found.tokens, "<i4").tolist()
            sequence.logprobs = np.frombuffer(found.logprobs, "<f4").tolist()
            sequence.top = [(np.frombuffer(i, "<i4"), np.frombuffer(v, "<f4")) for i, v in found.top]
            sequence.stopped = found.stopped
            sequence.generator.set_state(torch.frombuffer(bytearray(found.generator), dtype=torch.uint8))

    def result(self) -> Result:
        """Of a call whose sequences have all ended."""
        return Result(
            content_type=PROTO,
            body=self.answer(),
            units=len(self.prompt) + sum(len(sequence.tokens) for sequence in self.sequences),
            cpu_us=int(self.cpu_ns) // 1000,
            moved_bytes=self.tally.bytes,
            moved_us=self.tally.us,
        )

    def answer(self) -> bytes:
        """The SampleResponse."""
        message = pb.SampleResponse()
        for sequence in self.sequences:
            item = message.sequences.add(
                stop_reason=pb.STOP_REASON_STOP if sequence.stopped else pb.STOP_REASON_LENGTH,
                tokens=np.asarray(sequence.tokens, "<i4").tobytes(),
                logprobs=np.asarray(sequence.logprobs, "<f4").tobytes(),
            )
            if self.asked.topk_sample:
                _fill(item.topk_sampled_logprobs, sequence.top, self.asked.topk_sample)
        if self.asked.prompt_logprobs:
            message.prompt_logprobs = self.prompt_logprobs.astype("<f4").tobytes()
        if self.asked.topk_prompt:
            nothing = (np.zeros(self.asked.topk_prompt, "<i4"), np.full(self.asked.topk_prompt, EMPTY, "<f4"))
            _fill(message.topk_prompt_logprobs, [nothing, *self.prompt_top], self.asked.topk_prompt)
        return message.SerializeToString()


class Asked(Struct, frozen=True):
    """A checked request body. prompt: int64 (n). topk_*: 0 for none."""

    prompt: np.ndarray
    params: Params
    num_samples: int
    prompt_logprobs: bool
    topk_prompt: int
    topk_sample: int


def parse(body: bytes, limits: Limits) -> Asked:
    """Raises UserError for what is malformed, not built yet, or can never run."""
    try:
        request = json.loads(body)
        for name in _NOT_BUILT:
            if request.get(name):
                raise UserError(f"{name} is not built yet", "Leave it out")
        chunks = request["prompt"]["chunks"]
        if any(chunk.get("type", "encoded_text") != "encoded_text" for chunk in chunks):
            raise UserError("prompts of other chunks than encoded_text are not built yet")
        prompt = np.asarray([token for chunk in chunks for token in chunk["tokens"]], np.int64)
        asked = Asked(
            prompt=prompt,
            params=_params(request.get("sampling_params") or {}, len(prompt), limits),
            num_samples=int(request.get("num_samples") or 1),
            prompt_logprobs=bool(request.get("prompt_logprobs")),
            topk_prompt=int(request.get("topk_prompt_logprobs") or 0),
            topk_sample=int(request.get("topk_sample_logprobs") or 0),
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise UserError(f"malformed asample request: {type(error).__name__} {error}") from error
    if not len(prompt):
        raise UserError("the prompt is empty", "Send at least one token")
    if prompt.min() < 0 or prompt.max() >= limits.vocabulary:
        raise UserError("a prompt token is outside the vocabulary", f"Use 0 to {limits.vocabulary - 1}")
    for name, value in (("topk_prompt_logprobs", asked.topk_prompt), ("topk_sample_logprobs", asked.topk_sample)):
        if not 0 <= value <= limits.vocabulary:
            raise UserError(f"{name} is {value}", f"Use 0 to {limits.vocabulary}")
    if asked.num_samples < 1:
        raise UserError(f"num_samples is {asked.num_samples}", "Ask for at least one")
    return asked


def _params(given: dict, prompt: int, limits: Limits) -> Params:
    room = min(limits.max_context, limits.tokens + 1) - prompt
    if room < 1:
        raise UserError(
            f"a prompt of {prompt} tokens leaves no room in a context of {limits.max_context} "
            f"({limits.tokens} tokens of KV memory)",
            "Send a shorter one",
        )
    max_tokens = given.get("max_tokens")
    max_tokens = room if max_tokens is None else int(max_tokens)
    if not 1 <= max_tokens <= room:
        raise UserError(
            f"max_tokens {max_tokens} with a prompt of {prompt} tokens: 1 to {room} fit a context of "
            f"{limits.max_context} and {limits.tokens} tokens of KV memory",
            "Lower it or shorten the prompt",
        )
    temperature = float(given.get("temperature", 1.0))
    top_k, top_p = int(given.get("top_k", -1)), float(given.get("top_p", 1.0))
    if not (math.isfinite(temperature) and temperature >= 0):
        raise UserError(f"temperature is {temperature}", "Use 0 (greedy) or more")
    if top_k < -1 or not 0 < top_p <= 1:
        raise UserError(f"top_k {top_k}, top_p {top_p}", "Use top_k -1 or more and top_p above 0 up to 1")
    tokens, strings = _stop(given.get("stop"), limits.eos)
    seed = given.get("seed")
    return Params(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=min(max(top_k, 0), limits.vocabulary),
        top_p=top_p,
        seed=None if seed is None else int(seed),
        stop_tokens=tokens,
        stop_strings=strings,
    )


def _stop(stop: object, eos: frozenset[int]) -> tuple[frozenset[int], tuple[str, ...]]:
    """None: end at EOS. Strings or token ids: end at EOS and at these. An empty list: end at nothing, not even EOS."""
    if stop is None:
        return eos, ()
    if isinstance(stop, str):
        stop = [stop]
    if not isinstance(stop, list):
        raise UserError("stop is neither a string nor a list", "Use strings or token ids")
    if not stop:
        return frozenset(), ()
    if all(isinstance(item, str) and item for item in stop):
        return eos, tuple(stop)
    if all(isinstance(item, int) and not isinstance(item, bool) for item in stop):
        return eos | frozenset(stop), ()
    raise UserError("stop mixes kinds or holds an empty string", "Use strings or token ids")


def _fill(table: pb.TopkLogprobs, rows: list[tuple[np.ndarray, np.ndarray]], k: int) -> None:
    table.k, table.length = k, len(rows)
    table.token_ids = b"".join(ids.astype("<i4").tobytes() for ids, _ in rows)
    table.logprobs = b"".join(values.astype("<f4").tobytes() for _, values in rows)
