"""The sample engine: continuous batching over a fixed KV memory."""

from __future__ import annotations

import math
import time
from collections import deque

import numpy as np
import torch

from plexrl.engines import layout
from plexrl.engines.parking import Meter, keep
from plexrl.engines.protocol import EngineSpec, UserError
from plexrl.engines.torch import asample
from plexrl.engines.torch.asample import Limits, Request, Sequence
from plexrl.engines.torch.crossing import Crossing, Tally
from plexrl.engines.torch.draw import draw
from plexrl.engines.torch.home import Home, manifest
from plexrl.engines.torch.kv import KvTable, Prompt, Rows
from plexrl.engines.torch.lora import Shape
from plexrl.engines.torch.losses import CHUNK, token_logprobs
from plexrl.engines.torch.model import backbone, head
from plexrl.engines.torch.park import Park
from plexrl.engines.torch.stops import Stops
from plexrl.engines.torch.versions import Versions
from plexrl.memory.arena import ArenaMap
from plexrl.memory.device import Device
from plexrl.memory.gate import Seat
from plexrl.types import BadInput, Moved, PlexrlError, Result, Slab

# Prompt tokens that one step reads at most before it decodes (a longer prompt goes alone): steps bound a pause's delay.
PREFILL_TOKENS = 1024


class Sampler:
    """protocol.SampleEngine. Requests are admitted in order of arrival; a sequence keeps its row to its end."""

    def __init__(self, spec: EngineSpec, device: Device, arena: ArenaMap, seat: Seat | None = None) -> None:
        """Raises BadInput for a spec or model that does not fit."""
        if spec.world != 1:
            raise BadInput("a sampler replica of several ranks is not built yet", "Give it one GPU per replica")
        if spec.park is None:
            raise BadInput("the sampler got no slab to park its KV in", "Allocate Sizes.park_bytes in the arena")
        self._spec = spec
        self._home = home = Home(spec, device, arena, seat)
        self._crossing = Crossing(device, home.region, seat)
        self._versions = Versions(home)
        plan = manifest({"kv": layout.kv_specs(home.arch, spec.dtype, spec.kv_bytes)})
        self._table = KvTable(list(plan.views(home.region.buffer)["kv"].values()), spec.max_batch)
        parked = list(plan.views(arena.view(spec.park))["kv"].values())
        self._park = Park(self._table, plan.buckets[0], parked, spec.extent_offset or 0)
        self._meter = Meter()
        self._meter.copied("in", self._versions.built.bytes_in, self._versions.built.seconds)
        self._backbone = backbone(home.model)
        self._waiting: deque[Sequence] = deque()
        self._requests: dict[str, Request] = {}
        self._left: list[Sequence] = []  # dropped while off the device; their rows are freed after that
        self._stops = Stops(spec.model_dir)
        self._limits = Limits(
            vocabulary=home.vocabulary,
            max_context=spec.max_context,
            tokens=self._table.tokens,
            eos=self._stops.eos,
        )

    # --- versions -------------------------------------------------------------------------------------------------

    def attach(
        self, version: str, slab: Slab | None, lora_rank: int | None, attn: bool, mlp: bool, unembed: bool
    ) -> None:
        """See protocol.SampleEngine. Attaching a known version again changes nothing."""
        shape = None if slab is None or lora_rank is None else Shape(lora_rank, attn, mlp, unembed)
        self._versions.attach(version, slab, shape)

    def detach(self, version: str) -> None:
        """See protocol.SampleEngine. Raises BadInput while a call uses it."""
        if any(request.version == version for request in self._requests.values()):
            raise BadInput(f"version {version!r} is in use", "Detach it when its calls have ended")
        self._versions.detach(version, self._crossing.on_device)

    # --- calls ----------------------------------------------------------------------------------------------------

    def add(self, call_id: str, version: str | None, body: bytes, drawn: bytes = b"") -> None:
        """See protocol.SampleEngine."""
        self._versions.check(version)
        if call_id in self._requests:
            raise BadInput(f"call {call_id!r} is here already", "Add a call once")
        request = Request(call_id, version, asample.parse(body, self._limits))
        self._stops.prepare(request.params)
        if drawn:
            request.unpack(drawn)
        self._requests[call_id] = request
        self._waiting.extend(sequence for sequence in request.sequences if not sequence.ended)

    def take(self, call_id: str) -> bytes:
        """See protocol.SampleEngine."""
        request = self._requests[call_id]
        self._forget(request)
        return request.pack()

    def drawn(self, call_id: str) -> tuple[int, bytes]:
        """See protocol.SampleEngine. Nothing before its prompt was read here."""
        request = self._requests[call_id]
        if request.first is None:
            return 0, b""
        return sum(len(sequence.tokens) for sequence in request.sequences), request.answer()

    def live(self) -> int:
        """See protocol.SampleEngine."""
        return len(self._requests)

    def cancel(self, call_id: str) -> None:
        """See protocol.SampleEngine."""
        request = self._requests.get(call_id)
        if request is not None:
            self._forget(request)

    @torch.no_grad()
    def step(self) -> list[tuple[str, Result | UserError]]:
        """See protocol.SampleEngine."""
        if not self._crossing.on_device:
            raise PlexrlError("the sampler is not on its device", "Load it first")
        self._clear_left()
        ended: list[tuple[str, Result | UserError]] = []
        # The first token comes from the prompt's own logits; who came from another replica has drawn it there.
        if newcomers := [sequence for sequence in self._admit() if not sequence.tokens]:
            draw(torch.stack([s.request.first for s in newcomers]), newcomers)
            ended += self._settle(newcomers)
        groups: dict[str | None, list[Sequence]] = {}
        for sequence in self._table.rows:
            groups.setdefault(sequence.request.version, []).append(sequence)
        for version, sequences in groups.items():
            self._decode(version, sequences)
            ended += self._settle(sequences)
        return ended

    # --- residency ------------------------------------------------------------------------------------------------

    def offload(self) -> Moved:
        """See protocol.SampleEngine. bytes_out: of rows that were parked, as far as host memory did not have them."""
        self._crossing.forget()
        self._clear_left()
        self._drop_rows()
        moved = self._crossing.leave([self._park, *self._versions.parts()])
        self._meter.copied("out", *self._park.copied)
        self._versions.left()
        return moved

    def load_device(self) -> Moved:
        """See protocol.SampleEngine. Adapters come in when they are used."""
        self._crossing.forget()
        self._versions.expect()
        moved = self._crossing.come([self._park, *self._versions.parts()])
        self._meter.copied("in", *self._park.copied)
        return moved

    def undo(self) -> Moved:
        """See protocol.SampleEngine."""
        self._versions.expect()
        return self.load_device() if self._crossing.left else self._crossing.undo()

    def close(self) -> None:
        """See protocol.SampleEngine."""
        self._requests.clear()
        self._waiting.clear()

    # --- inside ---------------------------------------------------------------------------------------------------

    def _clear_left(self) -> None:
        """Not at once when the device is there again: that may still be taken back, with rows as they were."""
        for sequence in self._left:
            self._table.remove(sequence)
        self._left.clear()

    def _drop_rows(self) -> None:
        """Sequences that are read again sooner than they are moved out and in give up their rows; they go on first."""
        costs, token_bytes = self._meter.costs, self._table.token_bytes
        dropped = [s for s in self._table.rows if not keep(s.cached, token_bytes, costs)]
        for sequence in dropped:
            self._table.remove(sequence)
        self._waiting.extendleft(reversed(dropped))

    def _admit(self) -> list[Sequence]:
        """Give rows to waiting sequences, in order, while they fit; their prompts are in the KV memory afterwards."""
        admitted: list[Sequence] = []
        budget = PREFILL_TOKENS
        while self._waiting:
            sequence = self._waiting[0]
            request = sequence.request
            if not self._table.fits(request.need) or (self._table.rows and not self._versions.joins(request.version)):
                break
            sibling = next((s for s in self._table.rows if s.request is request), None)
            reads = len(sequence.prefix) if sibling is None or sequence.tokens else 0
            if reads and budget < reads and budget < PREFILL_TOKENS:
                break
            self._waiting.popleft()
            self._table.add(sequence, request.need)
            if reads:
                budget -= reads
                self._prefill(sequence)
            else:
                self._table.replicate(sibling, sequence, len(request.prompt))
            admitted.append(sequence)
        return admitted

    def _prefill(self, sequence: Sequence) -> None:
        """Read prompt and prefix into the sequence's row; keep what all samples of the request need of the prompt."""
        start, begin = time.process_time_ns(), time.perf_counter()
        request = sequence.request
        self._versions.tally = tally = Tally()
        self._versions.wire(request.version)
        where = self._home.where
        prefix, prompt = torch.from_numpy(sequence.prefix).to(where), torch.from_numpy(request.prompt).to(where)
        cache = Prompt(self._table, sequence.row)
        hidden = self._backbone(
            input_ids=prefix[None],
            position_ids=torch.arange(len(prefix), device=where)[None],
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state[0, : len(prompt)]
        sequence.cached = len(prefix)
        hidden[-1, 0].item()  # what a GPU was only asked for is done: it is measured
        self._meter.read(len(prefix), time.perf_counter() - begin - tally.moved.seconds)
        asked, model_head = request.asked, head(self._home.model)
        if request.first is None:
            request.first = model_head(hidden[-1:])[0].float()
            if asked.prompt_logprobs:
                found = token_logprobs(hidden[:-1], model_head, prompt[1:, None], None)[:, 0]
                request.prompt_logprobs = np.concatenate(([np.nan], found.cpu().numpy()))
            if asked.topk_prompt:
                for rows in hidden[:-1].split(CHUNK):
                    values, ids = torch.log_softmax(model_head(rows).float(), -1).topk(asked.topk_prompt)
                    request.prompt_top.extend(zip(ids.cpu().numpy(), values.cpu().numpy(), strict=True))
        request.cpu_ns += time.process_time_ns() - start
        request.tally.add(tally.moved)

    def _decode(self, version: str | None, sequences: list[Sequence]) -> None:
        """One token for each sequence."""
        start = time.process_time_ns()
        self._versions.tally = sequences[0].request.tally
        self._versions.wire(version)
        cache = Rows(self._table, sequences, self._home.dtype)
        hidden = self._backbone(
            input_ids=torch.tensor([s.tokens[-1] for s in sequences], device=self._home.where)[:, None],
            attention_mask=cache.mask,
            position_ids=cache.positions,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state[:, 0]
        for sequence in sequences:
            sequence.cached += 1
        draw(head(self._home.model)(hidden).float(), sequences)
        share = (time.process_time_ns() - start) / len(sequences)
        for sequence in sequences:
            sequence.request.cpu_ns += share

    def _settle(self, drawn: list[Sequence]) -> list[tuple[str, Result | UserError]]:
        """After a draw: free the rows of sequences that ended; the calls that ended with them."""
        for sequence in drawn:
            sequence.stopped = self._stops.hit(sequence)
        broken = {s.request.call_id: s.request for s in drawn if not math.isfinite(s.logprobs[-1])}
        ended: list[tuple[str, Result | UserError]] = []
        for call_id, request in broken.items():
            self._forget(request)
            ended.append((call_id, UserError("the model's logits are not finite", "Load an earlier state")))
        if broken:
            self._table.scrub()
        for sequence in drawn:
            request = sequence.request
            if sequence.row is not None and sequence.ended:
                self._table.remove(sequence)
            if request.ended and request.call_id in self._requests:
                self._forget(request)
                ended.append((request.call_id, request.result()))
        return ended

    def _forget(self, request: Request) -> None:
        rows = [sequence for sequence in request.sequences if sequence.row is not None]
        if self._crossing.on_device:
            for sequence in rows:
                self._table.remove(sequence)
        else:  # what lies there now is another's
            self._left += rows
        self._waiting = deque(s for s in self._waiting if s.request is not request)
        self._requests.pop(request.call_id, None)
