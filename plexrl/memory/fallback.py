"""Other people's ways of taking state off a GPU, behind the two verbs of a resident state: offload and load.

For a process whose memory is not ours to lay out, and as figures to compare ours with (`python -m bench.asleep`). What
each costs is in docs/switching.md. They move everything they hold, each time, into host memory of their own that no
budget of ours counts; a failure in the middle ends the process's use.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Any

from plexrl.memory.resident import advance
from plexrl.types import Moved, PlexrlError, Residency, Unavailable

CHECKPOINT_TIMEOUT_S = 120


class Fallback:
    """State that starts on the device. size: bytes that it is known to hold there. Errors of the mechanism pass."""

    def __init__(self, size: int, sleep: Callable[[], Any], wake: Callable[[], Any]) -> None:
        self.residency = Residency.DEVICE
        self._size = size
        self._sleep = sleep
        self._wake = wake

    def offload(self) -> Moved:
        """Off the device. Raises IllegalTransition unless DEVICE; after any other error the state is LOST."""
        return Moved(bytes_out=self._size, seconds=self._go(Residency.OFFLOADING, self._sleep, Residency.HOST))

    def load(self) -> Moved:
        """Onto it again. Raises IllegalTransition unless HOST; after any other error the state is LOST."""
        return Moved(bytes_in=self._size, seconds=self._go(Residency.LOADING, self._wake, Residency.DEVICE))

    def _go(self, through: Residency, step: Callable[[], Any], to: Residency) -> float:
        self.residency = advance(self.residency, through)
        begun = time.perf_counter()
        try:
            step()
        except BaseException:
            self.residency = advance(self.residency, Residency.LOST)
            raise
        self.residency = advance(self.residency, to)
        return time.perf_counter() - begun


def vllm(llm: Any, size: int) -> Fallback:
    """llm: vllm.LLM made with enable_sleep_mode=True, refused on CPUs. Weights go to the host; the KV cache is lost."""
    return Fallback(size, lambda: llm.sleep(level=1), llm.wake_up)


def deepspeed(engine: Any, size: int) -> Fallback:
    """engine: of deepspeed.initialize, ZeRO 1 to 3; ZeRO 3 only with DeepSpeed's own FusedAdam."""
    return Fallback(size, engine.offload_states, engine.reload_states)


def torch_memory_saver(size: int) -> Fallback:
    """Tensors made in `torch_memory_saver.region(enable_cpu_backup=True)`. Raises Unavailable when not installed."""
    try:
        from torch_memory_saver import torch_memory_saver as saver
    except ImportError as error:
        raise Unavailable("torch_memory_saver is not installed", "pip install torch_memory_saver") from error
    return Fallback(size, saver.pause, saver.resume)


def cuda_checkpoint(pid: int, size: int) -> Fallback:
    """Any CUDA process of this user, by NVIDIA's `cuda-checkpoint` (driver 570 or later): it need not know of it.

    All of its GPU state goes, context included, so nothing of it stays on the device. Not with IPC or managed memory.
    """

    def act(*actions: str) -> None:
        for action in actions:
            command = ["cuda-checkpoint", "--action", action, "--pid", str(pid)]
            if action == "lock":
                command += ["--timeout", str(CHECKPOINT_TIMEOUT_S * 1000)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=2 * CHECKPOINT_TIMEOUT_S)
            except FileNotFoundError as error:
                raise Unavailable(
                    "cuda-checkpoint is not installed", "It is in NVIDIA's repository of that name"
                ) from error
            if done.returncode:
                said = (done.stderr or done.stdout).strip()
                raise PlexrlError(
                    f"cuda-checkpoint --action {action} of process {pid} ended with {done.returncode}: {said}",
                    "That process is not to be used any more",
                )

    return Fallback(size, lambda: act("lock", "checkpoint"), lambda: act("restore", "unlock"))
