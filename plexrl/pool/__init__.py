"""The pool: head, agents, engine hosts, and their life."""
