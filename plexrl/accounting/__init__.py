"""The ledger's arithmetic, the baseline, the published store and the reports."""
