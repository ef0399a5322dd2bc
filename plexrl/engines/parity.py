"""Whether engines say the same of the same tokens: what one draws, by what another trained, and forward passes.

Each engine runs in a process of its own, as a rank does (engines.probe), and all share one arena: a version goes from
trainer to sampler as it does in a pool.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Literal

import numpy as np
from msgspec import Struct, structs

from plexrl.engines import footprint
from plexrl.engines.probe import Probe
from plexrl.engines.protocol import EngineSpec
from plexrl.memory.arena import Arena
from plexrl.memory.pages import create_memfd
from plexrl.types import PlexrlError, Role, Slab

Dtype = Literal["float32", "bfloat16"]
BOUND: dict[Dtype, float] = {"float32": 1e-3, "bfloat16": 0.25}
"""Largest difference of two logprobs of one token that is put down to the order of sums."""
SAMPLERS, TRAINERS = ("torch", "vllm"), ("torch", "deepspeed")
_RANK, _PROMPT, _DRAWN, _SAMPLES = 8, 12, 24, 4
_ADAPTER = footprint.Trained(lora_rank=_RANK, attn=True, mlp=True, unembed=False)
_ROOM = 1 << 22


class Row(Struct, frozen=True, kw_only=True):
    """One comparison. of: of what; one, other: the engines. worst, mean: absolute differences of logprobs."""

    of: str
    one: str
    other: str
    tokens: int
    worst: float
    mean: float
    bound: float

    @property
    def holds(self) -> bool:
        """Whether they agree. NaN does not."""
        return self.worst <= self.bound


def compare(
    model_dir: str, dtype: Dtype, engines: Iterable[str], cache_dir: str, say: Callable[[str], None]
) -> list[Row]:
    """Run the engines that are named against each other on a model. say: told what is done now.

    Raises PlexrlError with the engine's own words when one cannot be built or fails; BadInput for no model.
    """
    wanted = list(engines)
    uses = {
        (engine, role): _use(engine, role, model_dir, dtype)
        for role, able in ((Role.TRAIN, TRAINERS), (Role.SAMPLE, SAMPLERS))
        for engine in able
        if engine in wanted
    }
    with ExitStack() as after:
        table = _Table(uses.values(), after)
        probes = {}
        for key, use in uses.items():
            say(f"building {use.engine}'s {'trainer' if use.role is Role.TRAIN else 'sampler'}")
            probes[key] = table.build(use, cache_dir)
        trainers = {engine: probe for (engine, role), probe in probes.items() if role is Role.TRAIN}
        samplers = {engine: probe for (engine, role), probe in probes.items() if role is Role.SAMPLE}
        rows = []
        data, prompts = _tokens(model_dir, 4, 40), _tokens(model_dir, 3, _PROMPT)
        trained = {}
        for engine, probe in trainers.items():
            say(f"training with {engine}")
            use = uses[engine, Role.TRAIN]
            state = table.slab(footprint.state(use, _ADAPTER))
            version = table.slab(footprint.snapshot(use, _ADAPTER))
            trained[engine] = probe.ask("train", state=state, version=version, trained=_ADAPTER, data=data)
            for sampler in samplers.values():
                sampler.ask("attach", name=engine, version=version, trained=_ADAPTER)
        for one, other in itertools.combinations(trained, 2):
            for moment in ("fresh", "stepped"):
                pairs = zip(trained[one][moment], trained[other][moment], strict=True)
                rows.append(_row(f"forward, adapter {moment}", one, other, dtype, pairs))
        for engine, sampler in samplers.items():
            for trainer, probe in trainers.items():
                say(f"drawing with {engine} by what {trainer} trained")
                drawn = sampler.ask("sample", name=trainer, prompts=prompts, samples=_SAMPLES, tokens=_DRAWN)
                forced = probe.ask("force", rows=[each["row"] for each in drawn])
                pairs = [
                    (each["logprobs"], row[-len(each["logprobs"]) :]) for each, row in zip(drawn, forced, strict=True)
                ]
                rows.append(_row("drawn, then forced", engine, trainer, dtype, pairs))
                pairs = [(each["prompt"], row[: len(each["prompt"])]) for each, row in zip(drawn, forced, strict=True)]
                rows.append(_row("prompt, then forced", engine, trainer, dtype, pairs))
        return rows


class _Table:
    """The arena that all processes share."""

    def __init__(self, uses: Iterable[footprint.Use], after: ExitStack) -> None:
        self._after = after
        total = _ROOM
        for use in uses:
            sizes = footprint.group(use)
            total += sizes.base_bytes + sizes.park_bytes
            if use.role is Role.TRAIN:
                total += footprint.state(use, _ADAPTER) + footprint.snapshot(use, _ADAPTER)
        total = -(-total // _ROOM) * _ROOM
        self._fd, self._size = create_memfd("arena", total), total
        self._arena = Arena(self._fd, total)
        after.callback(self._arena.close)
        self._bases: dict[str, Slab] = {}
        self._names = itertools.count()

    def slab(self, size: int) -> Slab:
        """A new one."""
        return self._arena.alloc(str(next(self._names)), size, 0)

    def build(self, use: footprint.Use, cache_dir: str) -> Probe:
        """An engine in a process of its own, on a device that is just large enough."""
        sizes = footprint.group(use)
        fields = {name: value for name, value in structs.asdict(use).items() if name in EngineSpec.__struct_fields__}
        fill = sizes.base_form not in self._bases
        if fill and sizes.base_bytes:
            self._bases[sizes.base_form] = self.slab(sizes.base_bytes)
        spec = EngineSpec(
            **fields,
            extent_size=sizes.device_bytes,
            device_bytes=sizes.device_bytes,
            base=self._bases.get(sizes.base_form),
            base_fill=fill,
            park=self.slab(sizes.park_bytes) if sizes.park_bytes else None,
            cache_dir=cache_dir,
        )
        return self._after.enter_context(Probe(spec, self._fd, self._size))


def _use(engine: str, role: Role, model_dir: str, dtype: Dtype) -> footprint.Use:
    return footprint.Use(
        engine=engine,
        role=role,
        kind="lora",
        model_dir=model_dir,
        dtype=dtype,
        world=1,
        zero_stage=1 if engine == "deepspeed" else 0,
        lora_slots=2,
        lora_max_rank=_RANK,
        kv_bytes=1 << 25,
        max_batch=16,
        max_context=128,
        micro_batch_tokens=256,
    )


def _tokens(model_dir: str, rows: int, length: int) -> list[list[int]]:
    """Random tokens, the same each time."""
    from plexrl.engines.layout import architecture

    vocabulary = architecture(model_dir).config["vocab_size"]
    return np.random.default_rng(length).integers(0, vocabulary, (rows, length)).tolist()


def _row(of: str, one: str, other: str, dtype: Dtype, pairs: Iterable[tuple[list[float], list[float]]]) -> Row:
    gaps = np.concatenate([np.abs(np.subtract(a, b)) for a, b in pairs])
    if not len(gaps):
        raise PlexrlError(f"{one} and {other} gave nothing to compare for {of!r}")
    worst = float(gaps.max())
    return Row(of=of, one=one, other=other, tokens=len(gaps), worst=worst, mean=float(gaps.mean()), bound=BOUND[dtype])
