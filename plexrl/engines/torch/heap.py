"""The process's own memory beside the region: activations, which malloc keeps for the next call."""

from __future__ import annotations

import ctypes

import psutil

# Keeping a trainer's activations (gigabytes) saves it the page faults of its next turn; a node short of memory needs
# them more. The share of the node's memory below which they are given back when a group leaves its device.
LOW = 0.25


def give_back_when_low() -> None:
    """Return free heap pages to the kernel if less than LOW of the node's memory is available."""
    memory = psutil.virtual_memory()
    if memory.available < LOW * memory.total:
        ctypes.CDLL(None).malloc_trim(0)
