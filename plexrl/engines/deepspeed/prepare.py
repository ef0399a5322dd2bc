"""`python -m plexrl.engines.deepspeed.prepare [--cache DIR] [--kind cpu|cuda]`: whether DeepSpeed can run here.

Nothing is compiled, on CPUs and on GPUs alike: its extensions are not used (see `start`), so DIR stays as it is. What
is left is to import it once, which writes Python's own cache, and to have it train a few numbers at every stage.
"""

from __future__ import annotations

import argparse
import sys
import time
from types import ModuleType

from plexrl.types import PlexrlError


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m plexrl.engines.deepspeed.prepare", description=__doc__)
    parser.add_argument("--cache", default="", help="where extensions would be kept, if there were any")
    parser.add_argument("--kind", choices=("cpu", "cuda"), default="cpu", help="of the devices")
    asked = parser.parse_args()
    begun = time.monotonic()
    try:
        from plexrl.engines.deepspeed import start
        from plexrl.engines.torch.gang import Gang

        _say(begun, "importing DeepSpeed")
        library = start.load(asked.kind, asked.cache)
        start.join(library, Gang(0, 1, "", "127.0.0.1"), "127.0.0.1", asked.kind)
        for stage in (1, 2, 3):
            _say(begun, f"one step of ZeRO {stage}")
            _step(library, stage, asked.kind)
    except PlexrlError as error:
        print(f"deepspeed: {error}", file=sys.stderr)
        return error.exit_code
    _say(begun, "ready; there was nothing to compile")
    return 0


def _step(library: ModuleType, stage: int, kind: str) -> None:
    import torch

    from plexrl.engines.deepspeed import start
    from plexrl.engines.deepspeed.form import settings

    module = torch.nn.Linear(8, 8, device=kind)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    engine = start.initialize(library, module, optimizer, settings(stage, 72, False))
    engine.backward(engine(torch.ones(2, 8, device=kind)).square().sum())
    engine.step()


def _say(begun: float, what: str) -> None:
    print(f"deepspeed: {time.monotonic() - begun:5.1f} s  {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
