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
from msgspec import Struct

from plexrl.engines import footprint
from plexrl.engines.probe import Datum, Probe, Table
from plexrl.types import Role

Dtype = Literal["float32", "bfloat16"]
BOUND: dict[Dtype, float] = {"float32": 1e-3, "bfloat16": 0.25}
"""Largest difference of two logprobs of one token that is put down to the order of sums."""
SAMPLERS, TRAINERS = ("torch", "vllm"), ("torch", "deepspeed")
_RANK, _PROMPT, _DRAWN, _SAMPLES = 8, 12, 24, 4
_STEPS = 2
_ADAM = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 0.0}
_ADAPTER = footprint.Trained(lora_rank=_RANK, attn=True, mlp=True, unembed=False)


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
        table = after.enter_context(Table(sum(map(_host_bytes, uses.values()))))
        probes = {}
        for key, use in uses.items():
            say(f"building {use.engine}'s {'trainer' if use.role is Role.TRAIN else 'sampler'}")
            probes[key] = after.enter_context(table.build(use, cache_dir=cache_dir))
        trainers = {engine: probe for (engine, role), probe in probes.items() if role is Role.TRAIN}
        samplers = {engine: probe for (engine, role), probe in probes.items() if role is Role.SAMPLE}
        rows = []
        data, prompts = _tokens(model_dir, 4, 40), _tokens(model_dir, 3, _PROMPT)
        said: dict[str, dict[str, list[list[float]]]] = {}
        for engine, trainer in trainers.items():
            say(f"training with {engine}")
            use = uses[engine, Role.TRAIN]
            trainer.ask("create", state=table.slab(footprint.state(use, _ADAPTER)), trained=_ADAPTER)
            said[engine] = {"fresh adapter": _forced(trainer, data)}
            for _ in range(_STEPS):
                trainer.ask("run", loss="cross_entropy", data=_data(data), forward_only=False)
                trainer.ask("step", adam=_ADAM)
            said[engine]["trained adapter"] = _forced(trainer, data)
            version = table.slab(footprint.snapshot(use, _ADAPTER))
            trainer.ask("publish", version=version)
            for sampler in samplers.values():
                sampler.ask("attach", name=engine, version=version, trained=_ADAPTER)
        for one, other in itertools.combinations(said, 2):
            for what, theirs in said[one].items():
                rows.append(_row(f"forward, {what}", one, other, dtype, theirs, said[other][what]))
        for engine, sampler in samplers.items():
            for name, trainer in trainers.items():
                say(f"drawing with {engine} by what {name} trained")
                drawn = sampler.ask("sample", name=name, prompts=prompts, samples=_SAMPLES, tokens=_DRAWN)
                forced = _forced(trainer, [each["row"] for each in drawn])
                ends = [row[_PROMPT - 1 :] for row in forced]
                rows.append(_row("drawn, then forced", engine, name, dtype, [e["logprobs"] for e in drawn], ends))
                starts = [row[: _PROMPT - 1] for row in forced]
                rows.append(_row("prompt, then forced", engine, name, dtype, [e["prompt"] for e in drawn], starts))
        return rows


def _data(rows: list[list[int]]) -> list[Datum]:
    return [{"tokens": row[:-1], "target_tokens": row[1:]} for row in rows]


def _forced(trainer: Probe, rows: list[list[int]]) -> list[list[float]]:
    """Logprobs of each row's tokens but the first, given those before."""
    return trainer.ask("run", loss="cross_entropy", data=_data(rows), forward_only=True)["logprobs"]


def _host_bytes(use: footprint.Use) -> int:
    """What a group and its one deployment take of the arena."""
    sizes = footprint.group(use)
    own = footprint.state(use, _ADAPTER) + footprint.snapshot(use, _ADAPTER) if use.role is Role.TRAIN else 0
    return sizes.base_bytes + sizes.park_bytes + own


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


def _row(of: str, one: str, other: str, dtype: Dtype, ours: list[list[float]], theirs: list[list[float]]) -> Row:
    gaps = np.concatenate([np.abs(np.subtract(a, b)) for a, b in zip(ours, theirs, strict=True)])
    worst = float(gaps.max())
    return Row(of=of, one=one, other=other, tokens=len(gaps), worst=worst, mean=float(gaps.mean()), bound=BOUND[dtype])
