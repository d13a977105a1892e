"""Behind scripts/soak.py: streams that are checked, what disturbs them, and what a run shows."""
