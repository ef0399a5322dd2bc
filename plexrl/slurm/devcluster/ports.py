"""Free TCP ports of the loopback interface, below the range the kernel hands out to clients."""

import random
import socket
from pathlib import Path

from plexrl.types import Unavailable

_LOWEST = 15000


def is_free(port: int) -> bool:
    """Whether a daemon could listen on this port now, on loopback and on every interface."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # daemons set it too: TIME_WAIT does not block them
        try:
            probe.bind(("0.0.0.0", port))
            probe.listen(1)
        except OSError:
            return False
    return True


def pick(names: list[str], remembered: dict[str, int], first: int | None) -> dict[str, int]:
    """A port for each name: `first`, first + 1, ... if given, else the remembered ones, else a free block.

    Raises Unavailable naming the port when one that was asked for is taken.
    """
    if first is not None:
        chosen = {name: first + index for index, name in enumerate(names)}
        for name, port in chosen.items():
            if not is_free(port):
                raise Unavailable(f"Port {port} for {name} is in use", "End its owner or choose another --port")
        return chosen
    if set(remembered) == set(names) and all(map(is_free, remembered.values())):
        return remembered
    ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(200):
        base = random.randrange(_LOWEST, max(ephemeral, _LOWEST + 5000) - len(names))
        block = range(base, base + len(names))
        if all(map(is_free, block)):
            return dict(zip(names, block, strict=True))
    raise Unavailable(f"No {len(names)} consecutive free ports found", "Name the first of a free block with --port")
