"""DeepSpeed's ZeRO optimizers over given memory: what they allocate at their start is exchanged for views, once.

Written against 0.19.8, whose own `reload_states` shows which tensors these are. A slot's optimizer keeps nothing about
the deployment that lies there beside these views: another one may lie there in the next call.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from plexrl.engines.deepspeed.held import ZeroHeld


class Replicas:
    """ZeRO 1 and 2: parameters are whole on every rank, in one flat buffer."""

    def __init__(self, engine: Any, held: ZeroHeld, trained: dict[str, nn.Parameter]) -> None:
        """trained: by name, without what stands between them."""
        self._zero = zero = engine.optimizer
        self._first = held.cuts.stage == 1
        zero.bit16_groups_flat[0] = held.flat
        zero._update_model_bit16_weights(0)
        zero.parallel_partitioned_bit16_groups[0] = zero.get_data_parallel_partitions(held.flat, 0)
        own = zero.single_partition_of_fp32_groups[0]
        own.data = held.master
        zero.optimizer.state[own] = _adam(held)
        # Links from parameters to what was there before; they are for its own checkpoints.
        zero._hp_optimizer_states_linked = True
        for parameter in zero.bit16_groups[0]:
            parameter._hp_mapping = None
        # Gradients of a part add up in one flat buffer, whatever the weights' dtype.
        zero._use_compact_grad_partition_buffer = lambda group: True
        if self._first:
            # bfloat16 gradients add up in float32 here too (its "mode 2"); asked for in the configuration, that would
            # choose an optimizer that keeps float32 gradients twice.
            zero.gradient_accumulation_dtype = held.grads.dtype
            zero.use_separate_grad_accum = zero.use_grad_accum_attribute = held.flat.dtype != held.grads.dtype
            self._grads = [(parameter, held.grad_views[name]) for name, parameter in trained.items()]
        else:
            self._part = zero._build_compact_grad_partition_buffer(0)
            self._part.flat_partition = held.grads[: held.cuts.part]
            self._part.move_flat_partition(held.grads.device)
        self.prime()

    def prime(self) -> None:
        """Gradients add up in the given memory from now on."""
        zero = self._zero
        zero._epilogue_ran_this_backward = False
        if not self._first:
            zero.averaged_gradients[0] = self._part
            return
        for parameter, view in self._grads:
            # A tensor of its own each time: the sum over ranks points it elsewhere.
            if zero.use_grad_accum_attribute:
                parameter.grad_accum = view.data
            else:
                parameter.grad = view.data

    def before_backward(self) -> None:
        """Nothing."""

    def after_backward(self) -> None:
        """Give up buffers that are only needed for the sum over ranks."""
        if self._first:
            self._zero._release_ipg_buffers()

    def before_step(self) -> None:
        """Have these buffers."""
        if self._first:
            self._zero.setup_buckets()

    def release(self) -> None:
        """Nothing."""


class Shards:
    """ZeRO 3: parameters are shared out, and gathered for the module that runs."""

    def __init__(self, engine: Any, held: ZeroHeld, trained: dict[str, nn.Parameter]) -> None:
        """See Replicas."""
        self._zero = zero = engine.optimizer
        zero.lp_param_buffer = held.own
        zero.fp16_partitioned_groups_flat[0] = held.own
        grads: dict[int, Tensor] = {}
        at = 0
        for parameter in zero.fp16_groups[0]:
            count = parameter.partition_numel()
            parameter.ds_tensor.data = held.own.narrow(0, at, count)
            grads[parameter.ds_id] = held.grads.narrow(0, at, count)
            at += count
        own = zero.fp32_partitioned_groups_flat[0]
        own.data = held.master
        zero.optimizer.state[own] = _adam(held)
        zero.grad_partitions_flat_buffer = held.grads
        zero._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition = grads
        self._grads = list(grads.values())

    def prime(self) -> None:
        """Nothing: gradients add up in the given memory in any case."""

    def before_backward(self) -> None:
        """Its first backward pass after a step would write over gradients in place of adding to them."""
        self._zero.micro_step_id = 1

    def after_backward(self) -> None:
        """All parameters back to their parts."""
        self.release()

    def before_step(self) -> None:
        """Step by what is in the given memory, also when nothing has run since the last step."""
        self._zero.averaged_gradients = {0: list(self._grads)}

    def release(self) -> None:
        """All parameters back to their parts."""
        self._zero._partition_all_parameters()


def _adam(held: ZeroHeld) -> dict[str, Tensor]:
    return {"step": held.counter, "exp_avg": held.moments[0], "exp_avg_sq": held.moments[1]}
