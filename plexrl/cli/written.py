"""A configuration as an admin would write it: every key with its value, defaults too, in the units of the file."""

from math import inf
from typing import Any

from pydantic import BaseModel

_DURATIONS = (("d", 86_400_000_000), ("h", 3_600_000_000), ("m", 60_000_000), ("s", 1_000_000), ("ms", 1000), ("us", 1))
_SIZES = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
_ABSENT = "-"


def written(section: BaseModel) -> dict[str, Any]:
    """Keys as in the file; read again, it is the same configuration."""
    fields = type(section).model_fields
    return {field.alias or name: _value(name, getattr(section, name)) for name, field in fields.items()}


def differences(old: BaseModel, new: BaseModel) -> list[tuple[str, str, str]]:
    """(dotted key, old value, new value) of what is not the same; `-` for a key that one of them has not."""
    before, after = _flat(written(old)), _flat(written(new))
    return [
        (key, before.get(key, _ABSENT), after.get(key, _ABSENT))
        for key in sorted(before.keys() | after.keys())
        if before.get(key, _ABSENT) != after.get(key, _ABSENT)
    ]


def for_json(value: Any) -> Any:
    """The same with what JSON has no number for as a text."""
    if isinstance(value, dict):
        return {key: for_json(each) for key, each in value.items()}
    if isinstance(value, list):
        return [for_json(each) for each in value]
    return "inf" if value == inf else value


def _value(name: str, value: Any) -> Any:
    if isinstance(value, BaseModel):
        return written(value)
    if isinstance(value, dict):
        return {key: _value(name, each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_value(name, each) for each in value]
    if isinstance(value, int) and not isinstance(value, bool):
        if name.endswith("_us"):
            return _units(value, _DURATIONS)
        if name == "bytes" or name.endswith("_bytes"):
            return _units(value, _SIZES)
    return value


def _units(value: int, units: tuple[tuple[str, int], ...]) -> str:
    """In the largest unit that says it exactly."""
    if not value:
        return f"0{units[-1][0]}"
    name, size = next((name, size) for name, size in units if value % size == 0)
    return f"{value // size}{name}"


def _flat(value: Any, key: str = "") -> dict[str, str]:
    if isinstance(value, dict) and value:
        found: dict[str, str] = {}
        for name, each in value.items():
            found |= _flat(each, f"{key}.{name}" if key else str(name))
        return found
    return {key: "none" if value is None else str(value)}
