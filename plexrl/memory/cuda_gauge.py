"""What this process holds on its GPU, as the GPU's own books have it (NVML)."""

from __future__ import annotations

import os
from contextlib import suppress


class Gauge:
    """NVML's view of one GPU. Where NVML is missing or tells nothing of processes, `held` is None."""

    def __init__(self, uuid: str) -> None:
        """uuid: of the GPU or MIG slice, as torch names it, with or without its `GPU-`."""
        self._nvml = None
        with suppress(Exception):  # No library, no driver, no such GPU: one answer to all.
            import pynvml

            pynvml.nvmlInit()
            name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(name)
            self._nvml = pynvml

    def used(self) -> int:
        """Bytes that all processes hold on the GPU; 0 where NVML is missing."""
        return 0 if self._nvml is None else self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used

    def held(self) -> int | None:
        """Bytes of this process: context, libraries, graphs, communicators, allocator and regions together.

        None inside a PID namespace of its own, where NVML names processes by other numbers.
        """
        if self._nvml is None:
            return None
        try:
            running = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        except self._nvml.NVMLError:
            return None
        return next((p.usedGpuMemory for p in running if p.pid == os.getpid()), None)
