"""Sizes and durations as people write them: `128MiB`, `50ms`."""

import math
import re
from typing import Annotated

from pydantic import BeforeValidator

_SIZE_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_DURATION_UNITS = {"us": 1, "ms": 10**3, "s": 10**6, "m": 60 * 10**6, "h": 3600 * 10**6, "d": 86400 * 10**6}
_WRITTEN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(value: object) -> int:
    """Bytes of `128MiB`, `1.5GB` or a plain number of bytes. Raises ValueError naming the accepted forms."""
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        size = _written(value, _SIZE_UNITS, "B", "a size such as 128MiB, 3GiB or a whole number of bytes")
    if size <= 0:
        raise ValueError(f"{value!r} is not a size above zero")
    return size


def parse_duration(value: object) -> int:
    """Microseconds of `50ms`, `20s`, `5m` or a plain number of seconds. Raises ValueError naming the accepted forms."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"{value!r} is not a duration of zero or more")
        return round(value * 10**6)
    return _written(value, _DURATION_UNITS, "s", "a duration such as 50ms, 20s, 5m, 7d or a number of seconds")


def _written(value: object, units: dict[str, int], plain: str, wanted: str) -> int:
    match = _WRITTEN.fullmatch(value) if isinstance(value, str) else None
    unit = units.get(match[2] or plain) if match else None
    if match is None or unit is None:
        raise ValueError(f"{value!r} is not {wanted} (units: {', '.join(units)})")
    return round(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


Bytes = Annotated[int, BeforeValidator(parse_size)]
Microseconds = Annotated[int, BeforeValidator(parse_duration)]
