"""Sequences of ours as requests of vLLM's, and what it drew as tokens and logprobs of ours."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from plexrl.engines.protocol import UserError
from plexrl.engines.torch.asample import Request, Sequence
from plexrl.engines.vllm.house import House
from plexrl.engines.vllm.sizing import BLOCK

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
    from vllm.v1.outputs import LogprobsTensors

# vLLM draws greedily below this.
_GREEDY = 1e-5


class Draws:
    """scheduled: tokens that the last step read."""

    def __init__(self, house: House) -> None:
        self.scheduled = 0
        self._client = house.client
        self._runner = house.runner
        self._live: dict[str, Sequence] = {}
        self._names: dict[int, str] = {}
        self._unread: set[int] = set()  # requests whose prompt's logprobs are still to come
        self._held: dict[int, LoRARequest | None] = {}  # requests whose other samples wait for the first one
        self._count = 0
        # Where vLLM makes a request's generator: ours takes its place.
        self._update_states = house.runner._update_states
        house.runner._update_states = self._with_generators

    def check(self, request: Request) -> None:
        """Raises UserError for settings that vLLM does not take."""
        try:
            self._settings(request.sequences[0], None)
        except ValueError as error:
            raise UserError(f"vLLM does not draw so: {error}") from error

    def add(self, request: Request, adapter: LoRARequest | None) -> None:
        """Queue all sequences that have not ended.

        Of a prompt of some blocks the first sample goes ahead; the others find its blocks when it has been read.
        """
        self._unread.add(id(request))
        if len(request.prompt) == 1:  # nothing stands before its only token
            request.prompt_logprobs = np.full(1, np.nan)
        fresh = not any(sequence.tokens for sequence in request.sequences)
        if fresh and len(request.sequences) > 1 and len(request.prompt) > BLOCK:
            self._queue(request, 0, 1, adapter)
            self._held[id(request)] = adapter
        else:
            self._queue(request, 0, len(request.sequences), adapter)

    def step(self) -> list[Sequence]:
        """One step of vLLM; the sequences that it drew a token for, or read the prompt of."""
        self.scheduled = 0
        touched: list[Sequence] = []
        for output in self._client.get_output().outputs:
            sequence = self._live.get(output.request_id)
            if sequence is not None:
                self._take(sequence, output)
                touched.append(sequence)
        return touched

    def live(self) -> int:
        """Sequences that vLLM has."""
        return len(self._live)

    def read(self, request: Request) -> bool:
        """Whether its prompt was read here."""
        return id(request) not in self._unread

    def end(self, sequence: Sequence) -> None:
        """A stop string ended it."""
        name = self._names.pop(id(sequence), None)
        if name is not None:
            del self._live[name]
            self._client.abort_requests([name])

    def drop(self, request: Request) -> None:
        """Forget a call."""
        for sequence in request.sequences:
            self.end(sequence)
        self._unread.discard(id(request))
        self._held.pop(id(request), None)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _queue(self, request: Request, start: int, end: int, adapter: LoRARequest | None) -> None:
        asked = request.asked
        for index in range(start, end):
            sequence = request.sequences[index]
            # The prompt's logprobs are the same for all samples: the first one is asked for them, ended or not.
            wants = index == 0 and (asked.prompt_logprobs or asked.topk_prompt) and request.prompt_logprobs is None
            if sequence.ended and not wants:
                continue
            self._count += 1
            name = f"{self._count}"
            self._live[name] = sequence
            self._names[id(sequence)] = name
            self._client.add_request(self._request(name, sequence, adapter, asked.topk_prompt if wants else None))

    def _settings(self, sequence: Sequence, top: int | None) -> SamplingParams:
        """top: as many of the likeliest tokens at each place of the prompt; None: no logprobs of the prompt."""
        from vllm import SamplingParams

        request, params = sequence.request, sequence.request.params
        greedy = params.temperature < _GREEDY
        return SamplingParams(
            max_tokens=max(params.max_tokens - len(sequence.tokens), 1),
            temperature=0.0 if greedy else params.temperature,
            top_k=params.top_k if not greedy else 0,
            top_p=params.top_p if not greedy else 1.0,
            seed=None if params.seed is None or greedy else sequence.generator.initial_seed() % 2**63,
            stop_token_ids=sorted(params.stop_tokens),
            ignore_eos=True,
            detokenize=False,
            logprobs=request.asked.topk_sample,
            prompt_logprobs=top,
        )

    def _request(
        self, name: str, sequence: Sequence, adapter: LoRARequest | None, top: int | None
    ) -> EngineCoreRequest:
        from vllm.v1.engine import EngineCoreRequest

        return EngineCoreRequest(
            request_id=name,
            prompt_token_ids=[*sequence.request.prompt.tolist(), *sequence.tokens],
            mm_features=None,
            sampling_params=self._settings(sequence, top),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=adapter,
            cache_salt=None,
            data_parallel_rank=None,
        )

    def _take(self, sequence: Sequence, output: EngineCoreOutput) -> None:
        request = sequence.request
        if id(request) in self._held:
            self._queue(request, 1, len(request.sequences), self._held.pop(id(request)))
        if output.new_prompt_logprobs_tensors is not None and request.prompt_logprobs is None:
            _keep_prompt(request, output.new_prompt_logprobs_tensors)
        if output.new_token_ids or output.finish_reason is not None:
            if request.prompt_logprobs is not None or not (request.asked.prompt_logprobs or request.asked.topk_prompt):
                self._unread.discard(id(request))
        if not sequence.ended:
            found = output.new_logprobs
            for index, token in enumerate(output.new_token_ids):
                sequence.tokens.append(token)
                sequence.logprobs.append(float(found.logprobs[index, 0]))
                if request.asked.topk_sample:
                    count = request.asked.topk_sample + 1
                    sequence.top.append((found.logprob_token_ids[index, 1:count], found.logprobs[index, 1:count]))
            sequence.stopped = bool(sequence.tokens) and sequence.tokens[-1] in request.params.stop_tokens
        if output.finish_reason is not None:
            del self._live[output.request_id]
            self._names.pop(id(sequence), None)

    def _with_generators(self, output: SchedulerOutput):
        """vLLM's own, then: a seeded sequence draws by its own generator, which goes with it to another replica."""
        self.scheduled += output.total_num_scheduled_tokens
        done = self._update_states(output)
        for new in output.scheduled_new_reqs:
            state = self._runner.requests[new.req_id]
            if state.generator is not None and state.generator.device.type == "cpu":
                sequence = self._live[new.req_id]
                state.generator.set_state(sequence.generator.get_state())
                sequence.generator = state.generator
        return done


def _keep_prompt(request: Request, found: LogprobsTensors) -> None:
    """Rows: places 1 to n of what was read; what was drawn before, elsewhere, is no part of the prompt."""
    rows = len(request.prompt) - 1
    values, ids = found.logprobs[:rows].cpu(), found.logprob_token_ids[:rows].cpu()
    request.prompt_logprobs = np.concatenate(([np.nan], values[:, 0].numpy()))
    if top := request.asked.topk_prompt:
        request.prompt_top = list(zip(ids[:, 1 : top + 1].numpy(), values[:, 1 : top + 1].numpy(), strict=True))
