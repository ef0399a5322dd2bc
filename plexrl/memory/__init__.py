"""Where tensors live and how they move: manifest, device, arena, resident state.

Nothing here imports torch before a tensor is asked for, so the head (sizes) and the agents (arena) start without it.
"""
