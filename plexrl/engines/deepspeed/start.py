"""DeepSpeed in a rank's process: imported once, with nothing to compile, on a process group that meets as gangs do.

Its shared-memory all-reduce (43 s of g++ on a CPU) is switched off: gloo does the same, and its segments in /dev/shm
are named by user and port, so that two gangs of one account would meet in them. Adam is torch's own.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import warnings
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import psutil
import torch
import torch.distributed as dist

from plexrl.config.engines import mend_of, missing
from plexrl.engines.torch.gang import TIMEOUT, Gang
from plexrl.types import BadInput


def check(kind: str) -> None:
    """Raises BadInput when DeepSpeed is not installed, or not the version that this is written against."""
    if lacking := missing("deepspeed", kind):
        raise BadInput(lacking, mend_of("deepspeed", kind))


def load(kind: str, cache_dir: str = "") -> ModuleType:
    """The library, for devices of this kind: cpu or cuda. Raises BadInput, see check."""
    check(kind)
    os.environ.setdefault("DS_ACCELERATOR", kind)
    os.environ.setdefault("LOCAL_RANK", "0")
    os.environ.setdefault("LOCAL_SIZE", "1")
    if cache_dir:
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", cache_dir)
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.WARNING)
    # Looked up, it would run compilers to find out what could be built.
    deepspeed.ops.__compatible_ops__ = {}
    _spare_inductor()
    return deepspeed


def initialize(library: ModuleType, module: torch.nn.Module, optimizer: torch.optim.Optimizer, config: Mapping) -> Any:
    """A DeepSpeedEngine over the module; a collective."""
    buffers = [(owner, dict(owner._buffers)) for owner in module.modules()]
    engine, *_ = library.initialize(model=module, optimizer=optimizer, config=dict(config), dist_init_required=False)
    # With bf16 it casts buffers too; rotary frequencies must stay float32.
    for owner, kept in buffers:
        owner._buffers.update(kept)
    return engine


def join(library: ModuleType, gang: Gang, interface: str, kind: str) -> None:
    """Have torch's default group be the gang, and DeepSpeed on it. A process has one rank for its life.

    Raises BadInput for a gang in which it has another one.
    """
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (gang.rank, gang.world):
            raise BadInput("this process is a rank of another gang already", "Start a process for each rank")
    else:
        store = dist.HashStore() if gang.store is None else dist.PrefixStore("deepspeed", gang.store)
        name = _device_of(interface)
        if name:
            os.environ["GLOO_SOCKET_IFNAME"] = name
        backend = "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=store, rank=gang.rank, world_size=gang.world, timeout=TIMEOUT)
    warnings.filterwarnings("ignore", message=r"`torch.distributed.\w+` is deprecated", category=FutureWarning)
    library.init_distributed("gloo" if kind == "cpu" else "nccl", auto_mpi_discovery=False, verbose=False)


def _spare_inductor() -> None:
    """Import an optimizer that we do not use without its kernels: seconds, and inductor's memory in each rank."""
    real = torch.compile
    torch.compile = lambda function=None, **_: function if function is not None else lambda found: found
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    finally:
        torch.compile = real


def _device_of(interface: str) -> str:
    """gloo's default group listens on a device by name. interface: as gang.process_group takes it."""
    if re.fullmatch(r"(lo|en|eth|ib|bond|br)\w*", interface):
        return interface
    try:
        address = socket.gethostbyname(interface)
    except OSError:
        return ""
    found = psutil.net_if_addrs().items()
    return next((name for name, held in found if any(each.address == address for each in held)), "")
