"""Experiments with everything fixed: `plexrl simulate --preset NAME`."""
