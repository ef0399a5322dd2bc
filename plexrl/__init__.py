"""PlexRL for Slurm: several RLVR jobs share one pool of GPUs, time-sliced at the level of function calls."""

__version__ = "0.1.0"
