"""The same data on every engine gives the same losses, logprobs and gradients; samplers draw what trainers force.

Each engine runs in a process of its own on one arena, as in a pool (engines.probe). Gangs of two ranks and the stages'
own ways stand in tests/unit/engines/deepspeed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from plexrl.config.engines import missing
from plexrl.engines import footprint, layout
from plexrl.engines.parity import BOUND
from plexrl.engines.probe import Datum, Probe, Table
from plexrl.types import Role, Slab

ADAPTER = footprint.Trained(lora_rank=4, attn=True, mlp=True, unembed=False)
WHOLE = footprint.Trained(lora_rank=None, attn=True, mlp=True, unembed=True)
# A step of AdamW with an eps far above every gradient is one of size lr/eps * gradient: it shows the gradients.
ADAM = {"learning_rate": 1.0, "beta1": 0.9, "beta2": 0.95, "eps": 1.0, "weight_decay": 0.0, "grad_clip_norm": 0.0}
# Sums of float32 in another order, on logprobs of about 6; relative, of gradients.
TIGHT, GRADIENT = 2e-5, 2e-4
LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo")
PROMPTS = [[7, 8, 9, 200, 11], [3, 250, 30]]


class Trainer:
    """A trainer in a process of its own, with one deployment. weights: as it published them last."""

    def __init__(self, table: Table, probe: Probe, use: footprint.Use, trained: footprint.Trained) -> None:
        self._table = table
        self.probe = probe
        arch = layout.architecture(use.model_dir)
        self._specs = layout.weight_specs(
            arch, use.dtype, trained.lora_rank, trained.attn, trained.mlp, trained.unembed
        )
        self.version: Slab = table.slab(footprint.snapshot(use, trained))
        probe.ask("create", state=table.slab(footprint.state(use, trained)), trained=trained)

    def run(self, loss: str, data: list[Datum], forward_only: bool = False) -> dict:
        return self.probe.ask("run", loss=loss, data=data, forward_only=forward_only)

    def weights(self) -> dict[str, np.ndarray]:
        self.probe.ask("publish", version=self.version)
        packed, found, offset = self._table.bytes_of(self.version), {}, 0
        for name, shape, _ in self._specs:
            size = 4 * int(np.prod(shape))
            found[name] = np.frombuffer(packed[offset : offset + size], "<f4").reshape(shape).copy()
            offset += layout.align(size)
        return found

    def gradients(self) -> dict[str, np.ndarray]:
        """What a step takes away."""
        before = self.weights()
        self.probe.ask("step", adam=ADAM)
        after = self.weights()
        return {name: before[name] - after[name] for name in before}


def use_of(model: Path, engine: str, role: Role, kind: str, stage: int = 0) -> footprint.Use:
    return footprint.Use(
        engine=engine,
        role=role,
        kind=kind,
        model_dir=str(model),
        dtype="float32",
        world=1,
        zero_stage=stage,
        lora_slots=2,
        lora_max_rank=8,
        kv_bytes=1 << 20,
        max_batch=16,
        max_context=128,
        micro_batch_tokens=64,
    )


@pytest.fixture
def build(tiny_model: Path, tmp_path: Path) -> Iterator[Callable[..., object]]:
    """Builds trainers and samplers of the tiny model on one arena."""
    with ExitStack() as after:
        table = after.enter_context(Table(48 << 20))

        def build(engine: str, kind: str, role: Role = Role.TRAIN, stage: int = 0) -> Trainer | Probe:
            if engine != "torch" and (why := missing(engine, "cpu")):
                pytest.skip(why)
            use = use_of(tiny_model, engine, role, kind, stage)
            probe = after.enter_context(table.build(use, cache_dir=str(tmp_path)))
            return Trainer(table, probe, use, ADAPTER if kind == "lora" else WHOLE) if role is Role.TRAIN else probe

        yield build


def data(loss: str) -> list[Datum]:
    """More than one micro-batch of sequences, with what the loss wants."""
    rng = np.random.default_rng(len(loss))
    rows = []
    for length in (6, 30, 17, 25, 9):
        tokens = rng.integers(0, 256, length + 1).tolist()
        row: Datum = {"tokens": tokens[:-1], "target_tokens": tokens[1:]}
        if loss == "cross_entropy":
            row["weights"] = rng.uniform(0, 1.5, length).tolist()
        else:
            row["logprobs"] = (-5.5 + 0.3 * rng.standard_normal(length)).tolist()
            row["advantages"] = rng.standard_normal(length).tolist()
        rows.append(row)
    return rows


def same(found: dict, expected: dict, bound: float) -> None:
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=bound)
    for one, other in zip(found["logprobs"], expected["logprobs"], strict=True):
        np.testing.assert_allclose(one, other, rtol=bound, atol=bound)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_deepspeed_gives_the_losses_logprobs_and_gradients_of_torch(build, kind: str) -> None:
    ours = build("torch", kind)
    begun, expected = ours.weights(), [course(ours, loss) for loss in LOSSES]
    assert all(max(np.abs(gradient).max() for gradient in gradients.values()) > 1e-3 for *_, gradients in expected)
    for stage in (1, 2, 3):
        theirs = build("deepspeed", kind, stage=stage)
        for name, value in theirs.weights().items():
            np.testing.assert_array_equal(value, begun[name])
        for loss, (*calls, gradients) in zip(LOSSES, expected, strict=True):
            found = course(theirs, loss)
            for one, other in zip(found[:-1], calls, strict=True):
                same(one, other, TIGHT)
            for name, gradient in gradients.items():
                close = {"rtol": GRADIENT, "atol": GRADIENT * np.abs(gradient).max()}
                np.testing.assert_allclose(found[-1][name], gradient, **close)


def course(trainer: Trainer, loss: str) -> tuple:
    """A forward pass, two calls whose gradients add up, and what a step takes."""
    said = [trainer.run(loss, data(loss), forward_only) for forward_only in (True, False, False)]
    return (*said, trainer.gradients())


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_what_vllm_draws_torch_and_deepspeed_force_alike(build, kind: str) -> None:
    """Versions of both trainers on one sampler: draws and prompts have the trainers' logprobs, and not the base's."""
    sampler = build("vllm", kind, Role.SAMPLE)
    trained = ADAPTER if kind == "lora" else WHOLE
    for name, stage in (("torch", 0), ("deepspeed", 2)):
        trainer = build(name, kind, stage=stage)
        fresh = forced(trainer, PROMPTS)
        trainer.run("cross_entropy", data("cross_entropy"))
        trainer.gradients()
        sampler.ask("attach", name=name, version=trainer.version, trained=trained)
        drawn = sampler.ask("sample", name=name, prompts=PROMPTS, samples=3, tokens=10)
        assert len(drawn) == 6 and all(len(each["logprobs"]) for each in drawn)
        for each, row in zip(drawn, forced(trainer, [each["row"] for each in drawn]), strict=True):
            start = len(row) - len(each["logprobs"])
            np.testing.assert_allclose(each["logprobs"], row[start:], atol=BOUND["float32"])
            np.testing.assert_allclose(each["prompt"], row[:start], atol=BOUND["float32"])
        change = max(np.abs(np.subtract(a, b)).max() for a, b in zip(fresh, forced(trainer, PROMPTS), strict=True))
        assert change > 20 * BOUND["float32"]


def forced(trainer: Trainer, rows: list[list[int]]) -> list[list[float]]:
    return trainer.run("cross_entropy", [{"tokens": r[:-1], "target_tokens": r[1:]} for r in rows], True)["logprobs"]
