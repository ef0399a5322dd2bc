"""How reports write numbers and times, in the terminal and on the page alike."""

from datetime import datetime

from plexrl.types import SpanClass

# class -> (one word for legends, what it means)
MEANING = {
    SpanClass.BUSY: "calls ran",
    SpanClass.SWITCH: "state moved, or an engine was built, while nothing ran",
    SpanClass.KEPT: "kept on purpose for a job's next call",
    SpanClass.IDLE: "nobody asked for it",
    SpanClass.STARTUP: "from the allocation's start until the pool was ready",
    SpanClass.DRAIN: "the pool was ending",
}


class Unit:
    """One unit for a whole report, so that its numbers can be added by eye: GPU-hours, small reports GPU-seconds."""

    def __init__(self, largest_gpu_seconds: float) -> None:
        hours = largest_gpu_seconds >= 2 * 3600
        self.name = "GPU-h" if hours else "GPU-s"
        self._divisor = 3600.0 if hours else 1.0
        self._digits = 2 if hours and largest_gpu_seconds < 200 * 3600 else 1

    def __call__(self, gpu_seconds: float) -> str:
        """The number without its unit; a minus sign proper."""
        return minus(f"{gpu_seconds / self._divisor:,.{self._digits}f}")


def minus(number: str) -> str:
    """-0.0 is 0.0, and a hyphen is no minus."""
    if not number.strip("-0.,"):
        return number.lstrip("-")
    return number.replace("-", "\u2212")


def percent(part: float, digits: int = 0) -> str:
    """A share of 1 as per cent; small ones are not rounded to nothing."""
    if 0 < part < 0.005 and digits == 0:
        return "<1 %"
    return minus(f"{100 * part:.{digits}f}") + " %"


def clock(seconds: float, with_date: bool = True) -> str:
    """Local time."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S" if with_date else "%H:%M:%S")


def duration(seconds: float) -> str:
    """12 s, 3 min 20 s, 2 h 05 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def size(count: float) -> str:
    """Bytes: 12 MiB, 3.4 GiB."""
    units = ("KiB", "MiB", "GiB", "TiB")
    power = 0
    count /= 1024
    while count >= 1024 and power + 1 < len(units):
        count, power = count / 1024, power + 1
    return f"{count:,.{1 if power > 1 else 0}f} {units[power]}"


def moved_words(found: dict, unit: Unit) -> str:
    """What switches cost and moved, and what of that nobody waited for."""
    moved = found["moved"]
    share = percent(found["shares"]["switch"], 1)
    words = (
        f"Switches: {unit(found['switch_gpu_seconds'])} {unit.name} exposed, {share} of the pool; "
        f"{size(moved['bytes_in'])} in, {size(moved['bytes_out'])} out, {size(moved['bytes_clean'])} clean and not "
        f"moved. Beside work, and in no sum: {unit(moved['hidden_gpu_seconds'])} {unit.name} of copies."
    )
    if moved["bytes_in_calls"]:
        waited = unit(moved["in_calls_gpu_seconds"])
        words += f" Within calls: {size(moved['bytes_in_calls'])}, {waited} {unit.name} of busy."
    return words


def sacct_words(found: dict) -> str:
    """What is said of Slurm's own sum."""
    if found["sacct_gpu_seconds"] is None:
        return "Slurm's own accounting was not there to compare with"
    attributed = found["charged_gpu_seconds"] + found["overhead_gpu_seconds"]
    apart = found["sacct_gpu_seconds"] - attributed
    each = minus(f"{apart / found['gpus']:+.1f}") if found["gpus"] else "-"
    return f"{minus(f'{apart:+.1f}')} GPU-s beside charged + overhead, {each} s per GPU"


def sure_words(found: dict, unit: Unit) -> str:
    """What of the dedicated runs each word of confidence stands for, never added up across them."""
    parts = [
        f"{unit(part['dedicated_gpu_seconds'])} {unit.name} {name} ({part['jobs']})"
        for name, part in found["by_confidence"].items()
        if "dedicated_gpu_seconds" in part
    ]
    words = f"Dedicated runs of jobs shown, by confidence (jobs): {', '.join(parts) or 'none'}."
    if found["fit_error"] is not None:
        words += f" Service models are off by {percent(found['fit_error'], 1)} a call in the mean."
    if "declared" in found["by_confidence"]:
        beyond = found["by_confidence"]["declared"]
        held = unit(beyond["beyond_use_gpu_seconds"])
        words += f" Declared beyond use, in no sum: {held} {unit.name} ({beyond['jobs']})."
    return words


def seen_words(uid: int | None, accounts: tuple[str, ...]) -> str:
    """Whose jobs a report shows; nothing to say of one that shows all."""
    if uid is None:
        return ""
    whose = f"Your own jobs and those of {', '.join(accounts)}" if accounts else "Your own jobs"
    return f"{whose}; the sums are the whole pool's."


def saved_words(found: dict) -> str:
    """The headline."""
    confidence = found["confidence"]
    if found["saved_percent"] is None:
        return "no job has called the pool yet"
    if found["saved_gpu_seconds"] < 0:
        more = percent(-found["saved_percent"] / 100, 1)
        return f"nothing; the pool held {more} more than dedicated runs would have ({confidence})"
    return f"{percent(found['saved_percent'] / 100, 1)} of what dedicated runs would have held ({confidence})"
