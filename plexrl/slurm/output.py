"""Where a job's script writes: Slurm 22.05 to 24.05 tell the pattern that was submitted, not the path."""

import re
from collections.abc import Mapping
from pathlib import Path

from plexrl.slurm.adapter import JobOutput

OUTPUT_FIELDS = "JobID JobArrayID ArrayJobID ArrayTaskID Name UserName UserID BatchHost WorkDir STDOUT STDERR".split()
"""What `job_output` reads, as `squeue --Format` calls it."""

_NONE = ("", "(null)", "N/A", "None")
_PATTERN = re.compile(r"%(\d*)([%AaJjNnstux])")
_NO_TASK = 4294967294


def job_output(fields: Mapping[str, str]) -> JobOutput:
    """From the texts of OUTPUT_FIELDS. Without names, a job writes to slurm-%j.out (slurm-%A_%a.out of an array)."""
    array = fields["ArrayTaskID"] not in _NONE
    usual = "slurm-%A_%a.out" if array else "slurm-%j.out"
    values = {
        "A": fields["ArrayJobID"] if array else fields["JobID"],
        "a": fields["ArrayTaskID"] if array else str(_NO_TASK),
        "J": fields["JobID"],
        "j": fields["JobID"],
        "N": fields["BatchHost"],
        "n": "0",
        "s": "batch",
        "t": "0",
        "u": fields["UserName"],
        "x": fields["Name"],
    }
    stdout = expanded(usual if fields["STDOUT"] in _NONE else fields["STDOUT"], values, fields["WorkDir"])
    stderr = stdout if fields["STDERR"] in _NONE else expanded(fields["STDERR"], values, fields["WorkDir"])
    return JobOutput(uid=int(fields["UserID"]), stdout=stdout, stderr=stderr)


def expanded(pattern: str, values: Mapping[str, str], folder: str) -> Path:
    """A file-name pattern of sbatch(1), below the job's folder: `%5j` is padded with zeros, `%%` is a percent sign, and
    a backslash anywhere keeps the pattern as it is, without the backslashes."""
    if "\\" in pattern:
        return Path(folder) / pattern.replace("\\", "")

    def one(found: re.Match[str]) -> str:
        width, letter = found.groups()
        if letter == "%":
            return "%"
        value = values[letter]
        return value.zfill(min(int(width), 10)) if width and value.isdigit() else value

    return Path(folder) / _PATTERN.sub(one, pattern)
