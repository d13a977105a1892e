"""Sketches that lie in the rows of SGLang's KV pool: written with the keys, and selected by."""

from cache_rank.kernels.by_device import by_device
from cache_rank.kernels.row_sketch import reference

encode_rows = by_device(reference.encode_rows)
select_rows = by_device(reference.select_rows)
row_scratch = by_device(reference.row_scratch)
