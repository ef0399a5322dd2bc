"""`python -m bench.publish [--json]`: a weight update from trainer to sampler, beside a reload from a file.

Both engines are the pool's torch engines behind the pool's own hosts, on two pretend GPUs and one arena, on one core.
An update is: a slab in the arena, the trainer's publication into it with its checksum, the sampler's comparison of
that, and its first token by the new version, less its second one (the same draw when nothing is left to move).
What the head adds to that are two messages (`python -m bench.call`).

The reference: the same tensors by safetensors' save_file, and a reload with the plain libraries: transformers'
from_pretrained, or peft's load_adapter into a model that is there. `in_place_seconds`: save_file, load_file and a copy
into parameters that are there, which is what an engine of one's own can do at best. Neither waits for the disk: the
file need not leave the page cache. `unchanged`: what of two versions in a row, one step apart, is the
same bytes, by element, block of 4 KiB and layer; `compare_seconds`: what it takes to find that out, layer by layer.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tinker.proto import tinker_public_pb2 as pb

from bench.publish_files import Files
from plexrl.engines import layout, sizing
from plexrl.engines.protocol import EngineSpec, build
from plexrl.memory.arena import Arena, ArenaMap
from plexrl.memory.device import CpuDevice
from plexrl.memory.pages import PAGE, align_up, create_memfd
from plexrl.pool.lockstep import Lockstep
from plexrl.pool.messages import Outcome, Work
from plexrl.pool.samplehost import SampleHost
from plexrl.pool.trainhost import TrainHost, TrainRank
from plexrl.types import BadInput, CallKind, PlexrlError, Role, Slab

MODEL = Path(".cache/models/smollm2-135m")
DTYPE = "bfloat16"
RANK = 32
REPEATS = 5
WARM = 2
KV_BYTES = 32 << 20
BLOCK = 4096
_ADAM = {"learning_rate": 1e-5, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}
_TOKENS = [1, 5, 9, 13, 17, 21, 25, 29, 33]
_ASK = {"prompt": {"chunks": [{"tokens": [7], "type": "encoded_text"}]}, "sampling_params": {"max_tokens": 1}}


class Pair:
    """A trainer and a sampler of one model, each on a device of its own. rank None: full parameters."""

    def __init__(self, model: str, rank: int | None) -> None:
        self.rank = rank
        self._model = model
        self._kind = "full" if rank is None else "lora"
        self._count = 0
        sizes = {role: self._sizes(role) for role in Role}
        state = sizing.state_bytes(model, DTYPE, self._kind, rank, True, True, True)
        self.bytes = sizing.snapshot_bytes(model, DTYPE, self._kind, rank, True, True, True)
        parts = (sizes[Role.TRAIN].base_bytes, sizes[Role.SAMPLE].park_bytes, state, *[self.bytes] * 3)
        total = sum(align_up(part, PAGE) for part in parts)
        self._fd = create_memfd("bench-arena", total)
        self._arena = Arena(self._fd, total)
        self._map = ArenaMap(self._fd, total)
        base = self._arena.alloc("base", sizes[Role.TRAIN].base_bytes, -1)
        trainer = self._build(Role.TRAIN, sizes, base, base_fill=True)
        park = self._arena.alloc("park", sizes[Role.SAMPLE].park_bytes, -1)
        sampler = self._build(Role.SAMPLE, sizes, base, park=park)
        trainer.create("d", self._arena.alloc("state", state, 1), rank, 1, True, True, True)
        self._trainer = TrainHost(TrainRank(trainer, 0, "n", True, self._map), Lockstep(0, 1, "", ""))
        self._sampler = SampleHost(sampler, "n", self._map)

    def _sizes(self, role: Role) -> sizing.Sizes:
        kv = KV_BYTES if role is Role.SAMPLE else 0
        return sizing.sizes(self._model, DTYPE, role, self._kind, 1, RANK, kv)

    def _build(self, role: Role, sizes: dict[Role, sizing.Sizes], base: Slab, **more: object) -> Any:
        size = align_up(sizes[role].device_bytes, PAGE)
        spec = EngineSpec(
            engine="torch",
            role=role,
            kind=self._kind,
            model_dir=self._model,
            dtype=DTYPE,
            extent_size=size,
            device_bytes=size,
            lora_max_rank=RANK,
            kv_bytes=KV_BYTES if role is Role.SAMPLE else 0,
            max_context=64,
            base=base,
            **more,
        )
        return build(spec, CpuDevice(create_memfd(f"bench-{role}", size), size), self._map)

    def step(self) -> None:
        """One step of training, so that there is something new to publish."""
        message = pb.ForwardBackwardRequest(loss_fn="cross_entropy")
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.array(_TOKENS[:-1], "<i4").tobytes()
        target = np.array(_TOKENS[1:], "<i8")
        datum.loss_fn_inputs["target_tokens"].CopyFrom(
            pb.Tensor(dtype=pb.DTYPE_INT64, shape=target.shape, dense=target.tobytes())
        )
        self._train(CallKind.FORWARD_BACKWARD, message.SerializeToString(), {})
        self._train(CallKind.OPTIM_STEP, json.dumps({"adam_params": _ADAM}).encode(), {})

    def update(self, version: str) -> tuple[float, int, float, Slab]:
        """Seconds of an update, bytes that the sampler moved for it, seconds of the publication alone, its slab."""
        begun = time.perf_counter()
        slab = self._arena.alloc(f"version:{version}", self.bytes, 1)
        args = {"slabs": {"n": slab}, "folder": "", "version": version}
        checksum = self._train(CallKind.PUBLISH, b"{}", args).body.decode()
        published = time.perf_counter() - begun
        shape = {"lora_rank": self.rank, "attn": True, "mlp": True, "unembed": True}
        self._sampler.order("attach", {"version": version, "slabs": {"n": slab}, "checksum": checksum, **shape})
        first = self._draw(version)
        seconds = time.perf_counter() - begun
        again = time.perf_counter()
        self._draw(version)
        return seconds - (time.perf_counter() - again), first.moved_bytes, published, slab

    def drop(self, version: str) -> None:
        """As the head does it beside the turns that follow."""
        self._sampler.order("detach", {"version": version})
        self._arena.free(f"version:{version}")

    def content(self, slab: Slab) -> bytes:
        """The bytes of a version."""
        return bytes(self._arena.bytes_of(slab)[: slab.size])

    def tensors(self, slab: Slab) -> dict[str, torch.Tensor]:
        """Copies of a version's tensors by name."""
        memory, at, found = torch.frombuffer(bytearray(self.content(slab)), dtype=torch.uint8), 0, {}
        for name, shape, dtype in self._specs():
            size = int(np.prod(shape)) * layout.ITEMSIZE[dtype]
            found[name] = memory[at : at + size].view(getattr(torch, dtype)).view(shape).clone()
            at += layout.align(size)
        return found

    def layers(self) -> list[int]:
        """Bytes of each layer of full parameters, in their order."""
        arch = layout.architecture(self._model)
        return [layout.packed(specs) for specs in layout.staged(arch, self._specs(), "weights").values()]

    def _specs(self) -> list[layout.Spec]:
        return layout.weight_specs(layout.architecture(self._model), DTYPE, self.rank, True, True, True)

    def _train(self, kind: CallKind, body: bytes, args: dict[str, object]) -> Outcome:
        return self._ended(self._trainer, kind, body, args)

    def _draw(self, version: str) -> Outcome:
        args = {"version": version}
        return self._ended(self._sampler, CallKind.SAMPLE, json.dumps(_ASK).encode(), args)

    def _ended(self, host: Any, kind: CallKind, body: bytes, args: dict[str, object]) -> Outcome:
        self._count += 1
        host.run((Work(id=str(self._count), kind=kind, deployment="d", seq=None, args=args, body=body),))
        while True:
            for outcome in host.step():
                if not outcome.ok:
                    raise PlexrlError(f"{kind} failed: {outcome.error}", "Report this")
                host.outcomes.clear()
                return outcome


def unchanged(old: bytes, new: bytes, layers: list[int]) -> dict[str, float]:
    """Shares of what is the same, of 16-bit elements, of blocks, of layers; and the seconds of the last comparison."""
    one, other = (np.frombuffer(each, np.uint16) for each in (old, new))
    same = one == other
    whole = len(same) // (BLOCK // 2) * (BLOCK // 2)
    begun, at, equal = time.perf_counter(), 0, 0
    for size in layers:
        equal += bool(np.array_equal(one[at : at + size // 2], other[at : at + size // 2]))
        at += size // 2
    seconds = time.perf_counter() - begun
    return {
        "elements": float(same.mean()),
        "blocks": float(same[:whole].reshape(-1, BLOCK // 2).all(1).mean()),
        "layers": equal / len(layers),
        "compare_seconds": seconds,
    }


def measure(model: str, rank: int | None, repeats: int, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """One row: medians. The first two updates find memory that nobody has touched yet, and do not count."""
    case = "full" if rank is None else "adapter"
    pair, files = Pair(model, rank), Files(model, rank, folder)
    found: list[tuple[float, float, float, float]] = []
    moved, before, same = 0, b"", {}
    for turn in range(repeats + WARM):
        pair.step()
        seconds, moved, published, slab = pair.update(f"v{turn}")
        tensors = pair.tensors(slab)
        reference, in_place = files.reload(tensors, f"v{turn}"), files.in_place(tensors)
        content = pair.content(slab) if rank is None else b""
        if before and not same:
            same = unchanged(before, content, pair.layers())
        before = content
        if turn:
            pair.drop(f"v{turn - 1}")
        if turn >= WARM:
            found.append((seconds, published, reference, in_place))
            say(f"{case} {len(found)}/{repeats}: {seconds:.3f} s, by file {reference:.3f} s, in place {in_place:.3f} s")
    seconds, published, reference, in_place = (statistics.median(each) for each in zip(*found, strict=True))
    row = {
        "case": case,
        "seconds": seconds,
        "publish_seconds": published,
        "bytes": pair.bytes,
        "moved_bytes": moved,
        "reference_seconds": reference,
        "in_place_seconds": in_place,
        "ratio": reference / seconds,
    }
    return row | ({"unchanged": same} if same else {})


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.publish", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL, help="a model folder (default: SmolLM2-135M's)")
    parser.add_argument("--dir", type=Path, help="where the reference's file goes (default: TMPDIR, else /var/tmp)")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    try:
        if not (args.model / "config.json").is_file():
            raise BadInput(f"there is no model in {args.model}", f"Run: plexrl model smollm2 {args.model}")
        if args.repeats < 1:
            raise BadInput("repeats are positive", "Leave them out")
        where = args.dir or os.environ.get("TMPDIR", "/var/tmp")
        rows = []
        for rank in (None, RANK):
            with tempfile.TemporaryDirectory(prefix="bench-publish.", dir=where) as folder:
                rows.append(measure(str(args.model.resolve()), rank, args.repeats, Path(folder), _say))
    except PlexrlError as error:
        print(f"bench.publish: {error}", file=sys.stderr)
        return error.exit_code
    if args.json:
        print(json.dumps({"model": args.model.name, "dtype": DTYPE, "rank": RANK, "rows": rows}))
        return 0
    for row in rows:
        print(
            f"{row['case']:>8} {row['bytes']:>14,} bytes {row['seconds']:>8.3f} s, "
            f"by file {row['reference_seconds']:>8.3f} s: {row['ratio']:.1f} times; "
            f"in place {row['in_place_seconds']:.3f} s"
        )
    return 0


def _say(line: str) -> None:
    print(f"bench.publish: {line}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
