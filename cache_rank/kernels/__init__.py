"""Kernels: a folder for each operation, or for each format.

A folder has up to three parts:

    reference.py    the specification, in plain torch: shapes, dtypes, and what is computed
    triton.py       the same functions for a GPU
    __init__.py     the functions that callers import; each runs one of the two, see `by_device`
"""
