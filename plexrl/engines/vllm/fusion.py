"""vLLM's model laid out in our memory: its fused parameters are the checkpoint's, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from msgspec import Struct
from torch import Tensor, nn

from plexrl.engines import layout
from plexrl.engines.torch.home import manifest
from plexrl.memory.manifest import Manifest
from plexrl.types import BadInput

# Buffers below this stay where they are: scales of single numbers that no kernel streams.
_SMALL = 1024
_MEND = "Write sample.engine: torch for this model"


class Part(Struct, frozen=True):
    """A tensor of vLLM's module tree. names: of the checkpoint's tensors, in the order in which their rows follow.

    padding: rows of zeros after them. No names: vLLM computed it.
    """

    name: str
    names: tuple[str, ...]
    padding: int
    shape: tuple[int, ...]


class Fusion:
    """The plan of a model: one bucket per checkpoint tensor, so that any version's slab is its source as it is.

    own: what the checkpoint does not have (rotary tables, rows that pad a vocabulary), by bucket, on the host.
    """

    def __init__(self, model: nn.Module, arch: layout.Architecture, dtype: str) -> None:
        """Raises BadInput for parameters that vLLM does not keep as the checkpoint has them."""
        self._tensors = dict(_walk(model))
        self._parts = [_part(name, t, arch, _packed(model)) for name, t in self._tensors.items()]
        named = [name for part in self._parts for name in part.names]
        if sorted(named) != sorted(arch.shapes):
            odd = sorted(set(named) ^ set(arch.shapes)) or [n for n in named if named.count(n) > 1]
            raise BadInput(f"vLLM's parameters and the files differ at {', '.join(odd[:3])}", _MEND)
        buckets: layout.Buckets = {}
        self.own: dict[str, Tensor] = {}
        for part in self._parts:
            tensor = self._tensors[part.name]
            kind = str(tensor.dtype).removeprefix("torch.")
            for name in part.names:
                buckets[name] = [(name, arch.shapes[name], dtype)]
            if not part.names or part.padding:
                shape = (part.padding, *part.shape[1:]) if part.names else part.shape
                buckets[_own(part.name)] = [(part.name, shape, kind)]
                self.own[_own(part.name)] = tensor[-part.padding :].clone() if part.names else tensor.clone()
        self.plan: Manifest = manifest(buckets)
        for bucket in self.plan.buckets:
            if bucket.name in self.own:
                self.own[bucket.name] = _bytes_of(self.own[bucket.name], bucket.size)

    def verify(self, base: Mapping[str, Tensor]) -> None:
        """Raise BadInput unless vLLM read the same parameters, in the same order, as lie in the base's slab."""
        for part in self._parts:
            at, tensor = 0, self._tensors[part.name]
            for name in part.names:
                rows = base[name].shape[0]
                if not torch.equal(tensor[at : at + rows], base[name]):
                    raise BadInput(f"vLLM keeps {name} otherwise than the checkpoint has it", _MEND)
                at += rows

    def bind(self, place: Tensor) -> None:
        """Make every tensor of the model a view of the place, which is laid out by the plan."""
        at = {bucket.name: bucket.offset for bucket in self.plan.buckets}
        ends = {bucket.name: bucket.tensors[0][1] + bucket.tensors[0][0].nbytes for bucket in self.plan.buckets}
        for part in self._parts:
            names = [*part.names, *([_own(part.name)] if not part.names or part.padding else [])]
            for name, following in zip(names, names[1:], strict=False):
                if ends[name] != at[following]:
                    raise BadInput(
                        f"{name} is no multiple of {layout.ALIGN} bytes long, so nothing fuses with it", _MEND
                    )
            tensor = self._tensors[part.name]
            start = at[names[0]]
            tensor.data = place[start : start + tensor.nbytes].view(tensor.dtype).view(part.shape)


def _walk(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers in the order of the module tree, each once."""
    yield from model.named_parameters()
    for name, buffer in model.named_buffers():
        if buffer.nbytes >= _SMALL:
            yield name, buffer


def _packed(model: nn.Module) -> dict[str, list[str]]:
    return getattr(model, "packed_modules_mapping", {})


def _part(name: str, tensor: Tensor, arch: layout.Architecture, packed: dict[str, list[str]]) -> Part:
    """base_layer: what adapters are wrapped around."""
    path, _, leaf = name.replace(".base_layer", "").rpartition(".")
    parent, _, module = path.rpartition(".")
    names = tuple(f"{parent}.{each}.{leaf}" for each in packed.get(module, ())) or (f"{path}.{leaf}",)
    if not all(each in arch.shapes for each in names):
        if any(each in arch.shapes for each in names) or isinstance(tensor, nn.Parameter):
            raise BadInput(f"vLLM has a parameter {name} that the files lack", _MEND)
        return Part(name, (), 0, tuple(tensor.shape))
    rows = sum(arch.shapes[each][0] for each in names)
    padding = tensor.shape[0] - rows
    if padding < 0 or any(arch.shapes[each][1:] != tuple(tensor.shape[1:]) for each in names):
        raise BadInput(f"vLLM keeps {name} as {tuple(tensor.shape)}, otherwise than the files", _MEND)
    return Part(name, names, padding, tuple(tensor.shape))


def _own(name: str) -> str:
    return f"vllm:{name}"


def _bytes_of(tensor: Tensor, size: int) -> Tensor:
    """A bucket's bytes: the tensor's, then zeros up to the bucket's end."""
    found = torch.zeros(size, dtype=torch.uint8)
    found[: tensor.nbytes] = tensor.contiguous().view(torch.uint8).flatten()
    return found
