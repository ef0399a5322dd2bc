"""How the processes of a pool find, trust and reach each other: registry files, MUNGE, CURVE, messages."""
