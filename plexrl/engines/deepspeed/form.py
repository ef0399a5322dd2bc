"""The form of a DeepSpeed trainer's states: torch.form.Form and Bound over ZeRO."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from plexrl.engines import layout
from plexrl.engines.deepspeed import start
from plexrl.engines.deepspeed.held import ZeroHeld
from plexrl.engines.deepspeed.partition import Partition, buckets
from plexrl.engines.deepspeed.sizing import REDUCE_ELEMENTS
from plexrl.engines.deepspeed.step import Step, gap
from plexrl.engines.deepspeed.wiring import Replicas, Shards
from plexrl.engines.torch import adam, batch
from plexrl.engines.torch.form import OPTIMIZER
from plexrl.engines.torch.gang import Gang
from plexrl.engines.torch.home import Home
from plexrl.engines.torch.lora import Adapters, Shape
from plexrl.engines.torch.model import bind
from plexrl.memory.manifest import Manifest


def settings(stage: int, elements: int, bfloat16: bool) -> dict[str, object]:
    """DeepSpeed's configuration. Its caller owns the boundary of accumulation, and calls step() when it is reached.

    elements: of all parameters. Gradients add up and travel in float32.
    """
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": bfloat16},
        # At stage 1 see wiring.Replicas.
        "data_types": {"grad_accum_dtype": "bf16" if bfloat16 and stage == 1 else "fp32"},
        "communication_data_type": "fp32",
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": False,
            # At stage 3 the buffer for it would stay allocated between calls.
            "contiguous_gradients": stage < 3,
            "reduce_bucket_size": min(REDUCE_ELEMENTS, elements),
            # Nothing stays gathered, and nothing is gathered ahead: all ranks gather the same in the same order.
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_max_live_parameters": 0,
        },
    }


class ZeroBound(ZeroHeld):
    """torch.form.Bound: a DeepSpeedEngine over one place, made when it is first needed."""

    def __init__(
        self,
        form: ZeroForm,
        plan: Manifest,
        place: Tensor,
        specs: list[layout.Spec],
        trained: dict[str, nn.Parameter],
        whole: bool,
    ) -> None:
        """trained: the module's parameters by the names of specs. whole: they are all of the model."""
        super().__init__(plan, place, specs, form.cuts(specs), form.gang.rank)
        self._form = form
        self._trained = trained
        self._whole = whole
        self._engine: Any = None
        self._wiring: Replicas | Shards
        self._open = False

    def ready(self) -> None:
        """See Bound. A collective the first time."""
        if self._engine is not None:
            return
        form, cuts = self._form, self.cuts
        flat: list[nn.Parameter] = []
        for name, parameter in self._trained.items():
            parameter.requires_grad_(True)
            if cuts.gaps[name]:
                flat.append(gap(cuts.gaps[name], parameter))
            flat.append(parameter)
        if cuts.after:
            flat.append(gap(cuts.after, self.flat))
        low = self.flat.dtype == torch.bfloat16
        step = Step(form.home.model, dict(enumerate(flat)), self._whole and cuts.stage == 3)
        optimizer = torch.optim.AdamW(flat, fused=True)
        self._engine = start.initialize(form.library, step, optimizer, settings(cuts.stage, cuts.total, low))
        self._wiring = (Shards if cuts.stage == 3 else Replicas)(self._engine, self, self._trained)

    def forward(self, work: batch.Batch, data: list[batch.Datum], train: bool) -> tuple[Tensor, Tensor]:
        """See Bound."""
        self.ready()
        if self._open:
            self._wiring.release()
        value, logprobs = self._engine(work, data, train, self._form.in_step)
        self._open = value.requires_grad
        if not self._open:
            self._wiring.release()
        return value, logprobs

    def backward(self, value: Tensor) -> None:
        """See Bound. DeepSpeed takes the mean over ranks of what are sums here."""
        self._wiring.before_backward()
        self._engine.backward(value * self.cuts.world if self.cuts.world > 1 else value)
        self._wiring.after_backward()
        self._open = False

    def step(self, params: adam.AdamParams, gang: Gang) -> float:
        """See Bound."""
        zero = self._engine.optimizer
        zero.clip_grad = params.grad_clip_norm
        zero.optimizer.param_groups[0].update(
            lr=params.learning_rate,
            betas=(params.beta1, params.beta2),
            eps=params.eps,
            weight_decay=params.weight_decay,
        )
        self._wiring.before_step()
        self._engine.step()
        norm = math.inf if zero.overflow else float(zero._global_grad_norm)
        self.clear("grads")
        self._wiring.prime()
        return norm


class ZeroForm:
    """torch.form.Form.

    Adapters are float32 whatever the base is, which stays as the torch engine has it: whole on every rank, one host
    copy per node.
    """

    def __init__(self, home: Home, gang: Gang) -> None:
        """A collective. Raises BadInput when DeepSpeed is missing or another version."""
        spec = home.spec
        kind = home.where.type
        self.home = home
        self.gang = gang
        self.library: ModuleType = start.load(kind, spec.cache_dir)
        start.join(self.library, gang, spec.interface, kind)
        self._stage = stage = spec.zero_stage
        self.in_step = stage > 1 and gang.world > 1
        self.together = stage == 3 or (gang.world > 1 and (stage == 2 or spec.kind == "lora"))
        master = spec.kind == "full" and spec.dtype == "bfloat16"
        self.optimizer = (*(("master",) if master else ()), *OPTIMIZER)

    def cuts(self, specs: list[layout.Spec]) -> Partition:
        """How the gang shares these tensors out."""
        return Partition(specs, self._stage, self.gang.world)

    def buckets(self, weights: list[layout.Spec], parts: layout.Buckets | None) -> layout.Buckets:
        """See Form."""
        return buckets(weights, parts, self._stage, self.gang.world)

    def at_home(self, plan: Manifest, memory: Tensor, shape: Shape | None) -> ZeroHeld:
        """See Form."""
        specs = self._specs(shape)
        return ZeroHeld(plan, memory, specs, self.cuts(specs), self.gang.rank)

    def on_device(
        self, plan: Manifest, place: Tensor, shape: Shape | None, slot: int | None, adapters: Adapters | None
    ) -> ZeroBound:
        """See Form. With shape None a collective."""
        specs = self._specs(shape)
        if self._stage == 3:
            # Parameters are made of the parts in the place; what DeepSpeed shares out at its start only has the shapes.
            scratch = torch.zeros(max(math.prod(s) for _, s, _ in specs), dtype=getattr(torch, specs[0][2]))
            views = {name: scratch[: math.prod(s)].view(s) for name, s, _ in specs}
        else:
            views = ZeroHeld(plan, place, specs, self.cuts(specs), self.gang.rank).named
        if shape is not None:
            return ZeroBound(self, plan, place, specs, adapters.ensure(slot, shape, views), False)
        model = self.home.model
        bind(model, views)
        found = dict(model.named_parameters())
        made = ZeroBound(self, plan, place, specs, {name: found[name] for name, _, _ in specs}, True)
        made.ready()
        return made

    def _specs(self, shape: Shape | None) -> list[layout.Spec]:
        return self.home.base_specs if shape is None else self.home.adapter_specs(shape)
