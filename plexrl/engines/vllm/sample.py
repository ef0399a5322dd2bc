"""The sample engine on vLLM: its scheduler batches, its kernels draw; requests and answers are ours."""

from __future__ import annotations

import math
import time
from collections import deque

import torch

from plexrl.engines.parking import Meter, keep
from plexrl.engines.protocol import EngineSpec, UserError
from plexrl.engines.torch import asample
from plexrl.engines.torch.asample import Limits, Request
from plexrl.engines.torch.crossing import Crossing, StatePart, Tally
from plexrl.engines.torch.lora import Shape
from plexrl.engines.torch.stops import Stops
from plexrl.engines.vllm import sizing
from plexrl.engines.vllm.blocks import Blocks
from plexrl.engines.vllm.draws import Draws
from plexrl.engines.vllm.house import House
from plexrl.engines.vllm.stacks import Stacks
from plexrl.engines.vllm.versions import Versions
from plexrl.memory.arena import ArenaMap
from plexrl.memory.device import Device
from plexrl.memory.gate import Seat
from plexrl.types import BadInput, Moved, PlexrlError, Result, Slab


class Sampler:
    """protocol.SampleEngine. Every sequence of a request is a request of vLLM's."""

    def __init__(self, spec: EngineSpec, device: Device, arena: ArenaMap, seat: Seat | None = None) -> None:
        """Raises BadInput for a spec or model that does not fit."""
        if spec.world != 1:
            raise BadInput("a sampler replica of several ranks is not built yet", "Give it one GPU per replica")
        self._house = house = House(spec, device, arena, seat)
        self._crossing = Crossing(device, house.region, seat)
        self._versions = Versions(house)
        self._blocks = Blocks(house)
        self._draws = Draws(house)
        names = [bucket.name for bucket in house.fusion.plan.buckets]
        self._parts = [self._blocks, Stacks(house), StatePart(house.state, names)]
        self._meter = Meter()
        self._meter.copied("in", house.built.bytes_in, house.built.seconds)
        self._requests: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()  # calls of a version that is not the model's yet (kind full)
        self._stops = Stops(spec.model_dir)
        self._limits = Limits(
            vocabulary=house.arch.config["vocab_size"],
            max_context=spec.max_context,
            tokens=(house.blocks.shape[1] - 1) * sizing.BLOCK,
            eos=self._stops.eos,
        )
        from plexrl.engines.vllm.sleepmode import HouseBackend

        HouseBackend.engine = self

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
        self._versions.detach(version)

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
        self._draws.check(request)
        self._requests[call_id] = request
        self._waiting.append(request)

    def take(self, call_id: str) -> bytes:
        """See protocol.SampleEngine."""
        request = self._requests[call_id]
        self._forget(request)
        return request.pack()

    def drawn(self, call_id: str) -> tuple[int, bytes]:
        """See protocol.SampleEngine. Nothing before its prompt was read here."""
        request = self._requests[call_id]
        if not self._draws.read(request):
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
        self._admit()
        start, begin = time.process_time_ns(), time.perf_counter()
        self._versions.tally = tally = Tally()
        self._versions.bring()
        touched = self._draws.step()
        seconds = time.perf_counter() - begin - tally.moved.seconds
        # Every token read has the same share of a step: the line through many steps tells what reading one costs.
        self._meter.read(self._draws.scheduled, max(seconds, 1e-9))
        ended: list[tuple[str, Result | UserError]] = []
        share = (time.process_time_ns() - start) / max(len(touched), 1)
        for sequence in touched:
            sequence.request.cpu_ns += share
        if touched:
            touched[0].request.tally.add(tally.moved)
        for request in {sequence.request.call_id: sequence.request for sequence in touched}.values():
            if outcome := self._settle(request):
                ended.append((request.call_id, outcome))
        return ended

    # --- residency ------------------------------------------------------------------------------------------------

    def offload(self) -> Moved:
        """See protocol.SampleEngine. bytes_out: of KV blocks, as far as host memory did not have them."""
        self._crossing.forget()
        self._drop()
        moved = self._crossing.leave(self._parts)
        self._meter.copied("out", *self._blocks.copied)
        self._versions.left()
        return moved

    def load_device(self) -> Moved:
        """See protocol.SampleEngine. Adapters come in when they are used."""
        self._crossing.forget()
        moved = self._crossing.come(self._parts)
        self._meter.copied("in", *self._blocks.copied)
        return moved

    def undo(self) -> Moved:
        """See protocol.SampleEngine. Adapters come again: their place may have been another's meanwhile."""
        moved = self.load_device() if self._crossing.left else self._crossing.undo()
        self._versions.left()
        return moved

    def close(self) -> None:
        """See protocol.SampleEngine."""
        for request in list(self._requests.values()):
            self._forget(request)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Give vLLM what may be drawn now, in order of arrival: of full parameters, one version's calls at a time."""
        while self._waiting:
            version = self._waiting[0].version
            if not self._versions.joins(version):
                if self._draws.live():
                    return
                self._versions.point(version)
            request = self._waiting.popleft()
            self._draws.add(request, self._versions.request(version))

    def _drop(self) -> None:
        """Sequences that are read again sooner than they are moved out and in give up their blocks."""
        costs = self._meter.costs
        token_bytes = self._blocks.size / sizing.BLOCK
        for running in list(self._house.scheduler.running)[::-1]:
            if not keep(running.num_computed_tokens, token_bytes, costs):
                self._blocks.read_again(running)
        self._blocks.forget_ended()

    def _settle(self, request: Request) -> Result | UserError | None:
        """After a draw: end what a stop string ends; the call's outcome when it has ended."""
        for sequence in request.sequences:
            if sequence.logprobs and not math.isfinite(sequence.logprobs[-1]):
                self._forget(request)
                self._blocks.forget_ended()
                return UserError("the model's logits are not finite", "Load an earlier state")
            if sequence.tokens and not sequence.stopped and self._stops.hit(sequence):
                sequence.stopped = True
                self._draws.end(sequence)
        if not request.ended or not self._draws.read(request):
            return None
        self._forget(request)
        return request.result()

    def _forget(self, request: Request) -> None:
        self._draws.drop(request)
        self._waiting = deque(each for each in self._waiting if each is not request)
        self._requests.pop(request.call_id, None)
