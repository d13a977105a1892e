"""Measures servers under reasoning loads: many streams of short prompts and long answers."""
