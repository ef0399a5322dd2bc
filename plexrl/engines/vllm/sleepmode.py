"""vLLM's own door to sleep on GPUs: whoever calls its sleep or wake_up gets our crossing and nothing of vLLM's.

vLLM's backend copies clean weights out into fresh pinned memory, drops that copy when it wakes, and clears all caches.
Ours moves what is new, from and to places that are there already. Written against vLLM 0.32.0; not run on a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.device_allocator.sleep_mode_backend import SleepModeBackend, SleepModeBackendFactory

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from plexrl.engines.protocol import SampleEngine

NAME = "plexrl"


class HouseBackend(SleepModeBackend):
    """engine: the replica of this process, set when it stands; levels and tags are vLLM's and change nothing here."""

    engine: SampleEngine | None = None

    def suspend(self, level: int = 1) -> None:
        """Leave the device."""
        self._of().offload()
        self._state = "SUSPENDED"

    def resume(self, tags: list[str] | None = None) -> None:
        """Be on the device again, all of it."""
        self._state = "RESUMING"
        self._of().load_device()
        self._state = "RUNNING"

    @classmethod
    def preserves_communicators(cls) -> bool:
        """A replica is one rank: its groups hold no device memory."""
        return True

    @classmethod
    def preserves_compiled_artifacts(cls) -> bool:
        """Addresses stay reserved, and kernels are not touched."""
        return True

    def _of(self) -> SampleEngine:
        if type(self).engine is None:
            raise RuntimeError("the replica is still being built")
        return type(self).engine


def register(config: VllmConfig) -> None:
    """Have this configuration's workers sleep by ours."""
    if NAME not in SleepModeBackendFactory._registry:
        SleepModeBackendFactory.register_backend(NAME, __name__, HouseBackend.__name__)
    config.model_config.sleep_mode_backend = NAME
