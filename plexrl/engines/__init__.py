"""What executes calls: torch (embedded) and noop, behind one small protocol."""
