"""The command line: one file per group of verbs. It prints; it never decides."""
