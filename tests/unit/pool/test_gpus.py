"""Real GPUs as far as a machine without one can tell: their names, and a nursery that asks CUDA nothing."""

import subprocess
import sys

import pytest

from plexrl.pool.gpus import names
from plexrl.types import BadInput


@pytest.mark.parametrize(
    ("environ", "count", "want"),
    [
        ({}, 2, ("0", "1")),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_JOB_GPUS": "4,5", "SLURM_JOB_ID": "1"}, 2, ("0", "1")),
        ({"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}, 1, ("MIG-a",)),
        ({"SLURM_STEP_GPUS": "3", "SLURM_JOB_GPUS": "2,3", "SLURM_JOB_ID": "1"}, 1, ("3",)),
        ({"SLURM_JOB_GPUS": "2,3", "SLURM_JOB_ID": "1"}, 2, ("2", "3")),
    ],
)
def test_slurm_s_word_for_what_the_step_sees_is_taken(environ, count, want):
    assert names(environ, count) == want


@pytest.mark.parametrize("environ", [{"SLURM_JOB_ID": "1"}, {"CUDA_VISIBLE_DEVICES": ""}, {"SLURM_JOB_GPUS": "2"}])
def test_too_few_are_refused_with_the_mend(environ):
    with pytest.raises(BadInput, match="--gpus-per-node"):
        names(environ, 2)


_IMPORTS = """
import sys, torch
torch.cuda._lazy_init = lambda: sys.exit("the driver was started")
from plexrl.pool import nursery
nursery._prepare([sys.argv[1]])
assert not torch.cuda.is_initialized()
# With these torch counts GPUs without the driver: there are none.
assert torch.cuda._nvml_based_avail() and torch.cuda._parse_visible_devices() == []
"""


def test_the_nursery_asks_the_driver_nothing(tiny_model):
    """A driver that was spoken to before a fork is of no use after it."""
    from plexrl.pool.nursery import _environment

    done = subprocess.run(
        [sys.executable, "-I", "-c", _IMPORTS, str(tiny_model)],
        env=_environment("cuda"),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
