"""The sample engine: continuous batching over a fixed KV memory."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from plexrl.engines import layout
from plexrl.engines.protocol import EngineSpec, UserError
from plexrl.engines.torch import asample
from plexrl.engines.torch.asample import Limits, Request, Sequence
from plexrl.engines.torch.draw import draw
from plexrl.engines.torch.home import Home, manifest, total
from plexrl.engines.torch.kv import KvTable, Prompt, Rows
from plexrl.engines.torch.lora import Shape
from plexrl.engines.torch.losses import CHUNK, token_logprobs
from plexrl.engines.torch.model import backbone, bind, head
from plexrl.engines.torch.versions import BASE, Versions
from plexrl.memory.arena import ArenaMap
from plexrl.memory.device import Device
from plexrl.memory.resident import DIRTY, ZERO, ResidentState
from plexrl.types import BadInput, Moved, PlexrlError, Result, Slab

PROTO = "application/x-protobuf"
# Prompt tokens that one step reads at most before it decodes (a longer prompt goes alone): steps bound a pause's delay.
PREFILL_TOKENS = 1024


class Sampler:
    """protocol.SampleEngine. Requests are admitted in order of arrival; a sequence keeps its row to its end."""

    def __init__(self, spec: EngineSpec, device: Device, arena: ArenaMap) -> None:
        """Raises BadInput for a spec or model that does not fit."""
        if spec.world != 1:
            raise BadInput("a sampler replica of several ranks is not built yet", "Give it one GPU per replica")
        if spec.park is None:
            raise BadInput("the sampler got no slab to park its KV in", "Allocate Sizes.park_bytes in the arena")
        self._spec = spec
        self._home = home = Home(spec, device, arena)
        plan = manifest({BASE: home.base_specs, "kv": layout.kv_specs(home.arch, spec.dtype, spec.kv_bytes)})
        self._state = ResidentState(plan, home.region.buffer, arena.view(spec.park), {BASE: home.base()})
        self._state.load()
        views = plan.views(home.region.buffer)
        bind(home.model, views[BASE])
        self._table = KvTable(list(views["kv"].values()), spec.max_batch)
        self._backbone = backbone(home.model)
        self._versions = Versions(home, self._state)
        self._waiting: deque[Sequence] = deque()
        self._requests: dict[str, Request] = {}
        self._left: list[Sequence] = []  # dropped while off the device; their rows are freed when it is back
        self._limits = Limits(
            vocabulary=home.vocabulary,
            max_context=spec.max_context,
            tokens=self._table.tokens,
            eos=_eos(Path(spec.model_dir)),
        )
        self._tokenizer: Tokenizer | None = None
        self._on_device = True

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
        self._versions.detach(version, self._on_device)

    # --- calls ----------------------------------------------------------------------------------------------------

    def add(self, call_id: str, version: str | None, body: bytes, drawn: bytes = b"") -> None:
        """See protocol.SampleEngine."""
        self._versions.check(version)
        if call_id in self._requests:
            raise BadInput(f"call {call_id!r} is here already", "Add a call once")
        request = Request(call_id, version, asample.parse(body, self._limits))
        if request.params.stop_strings and self._tokenizer is None:
            self._tokenizer = _tokenizer(Path(self._spec.model_dir))
        if drawn:
            request.unpack(drawn)
        self._requests[call_id] = request
        self._waiting.extend(sequence for sequence in request.sequences if not sequence.ended)

    def take(self, call_id: str) -> bytes:
        """See protocol.SampleEngine."""
        request = self._requests[call_id]
        self._forget(request)
        return request.pack()

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
        if not self._on_device:
            raise PlexrlError("the sampler is not on its device", "Load it first")
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
        """See protocol.SampleEngine."""
        self._state.mark("kv", DIRTY if self._table.rows else ZERO)
        moved = self._versions.offload()
        moved.append(self._state.offload())
        self._home.device.unmap(self._home.region)
        self._on_device = False
        return total(moved)

    def load_device(self) -> Moved:
        """See protocol.SampleEngine. Adapters come in when they are used."""
        self._home.device.map(self._home.region)
        self._on_device = True
        moved = self._state.load()
        for sequence in self._left:
            self._table.remove(sequence)
        self._left.clear()
        return moved

    def close(self) -> None:
        """See protocol.SampleEngine."""
        self._requests.clear()
        self._waiting.clear()

    # --- inside ---------------------------------------------------------------------------------------------------

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
        start = time.process_time_ns()
        request = sequence.request
        self._versions.wire(request.version)
        prefix, prompt = torch.from_numpy(sequence.prefix), torch.from_numpy(request.prompt)
        cache = Prompt(self._table, sequence.row)
        hidden = self._backbone(
            input_ids=prefix[None],
            position_ids=torch.arange(len(prefix))[None],
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state[0, : len(prompt)]
        sequence.cached = len(prefix)
        asked, model_head = request.asked, head(self._home.model)
        if request.first is None:
            request.first = model_head(hidden[-1:])[0].float()
            if asked.prompt_logprobs:
                found = token_logprobs(hidden[:-1], model_head, prompt[1:, None], None)[:, 0]
                request.prompt_logprobs = np.concatenate(([np.nan], found.numpy()))
            if asked.topk_prompt:
                for rows in hidden[:-1].split(CHUNK):
                    values, ids = torch.log_softmax(model_head(rows).float(), -1).topk(asked.topk_prompt)
                    request.prompt_top.extend(zip(ids.numpy(), values.numpy(), strict=True))
        request.cpu_ns += time.process_time_ns() - start

    def _decode(self, version: str | None, sequences: list[Sequence]) -> None:
        """One token for each sequence."""
        start = time.process_time_ns()
        self._versions.wire(version)
        cache = Rows(self._table, sequences, self._home.dtype)
        hidden = self._backbone(
            input_ids=torch.tensor([s.tokens[-1] for s in sequences])[:, None],
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
            sequence.stopped = self._stops(sequence)
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
                drawn_tokens = sum(len(s.tokens) for s in request.sequences)
                result = Result(
                    content_type=PROTO,
                    body=request.answer(),
                    units=len(request.prompt) + drawn_tokens,
                    cpu_us=int(request.cpu_ns) // 1000,
                )
                ended.append((request.call_id, result))
        return ended

    def _stops(self, sequence: Sequence) -> bool:
        params = sequence.request.params
        if sequence.tokens[-1] in params.stop_tokens:
            return True
        if not params.stop_strings:
            return False
        # A token is at least one byte, so the newest one can complete no string that begins further back than this.
        reach = max(len(text.encode()) for text in params.stop_strings) + 8
        text = self._tokenizer.decode(sequence.tokens[-reach:], skip_special_tokens=False)
        return any(stop in text for stop in params.stop_strings)

    def _forget(self, request: Request) -> None:
        rows = [sequence for sequence in request.sequences if sequence.row is not None]
        if self._on_device:
            for sequence in rows:
                self._table.remove(sequence)
        else:  # what lies there now is another's
            self._left += rows
        self._waiting = deque(s for s in self._waiting if s.request is not request)
        self._requests.pop(request.call_id, None)


def _eos(folder: Path) -> frozenset[int]:
    """What ends a sequence: generation_config.json's ids, else config.json's."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        found = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if found is not None:
            return frozenset(found if isinstance(found, list) else [found])
    return frozenset()


def _tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UserError("this model has no tokenizer.json, so stop strings cannot be found", "Use stop token ids")
    return Tokenizer.from_file(str(path))
