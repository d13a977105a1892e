"""How fast decode is: what `scripts/profile_tpot.py` runs, records and reports."""
