"""A logical job's side of a pool: its loopback proxy, the helper that starts it, and `plexrl attach`."""
