"""Measures what a sparse or compressed KV cache costs in accuracy, through the real server."""
