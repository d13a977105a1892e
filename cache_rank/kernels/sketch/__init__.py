"""Small copies of keys, which scores read."""

from cache_rank.kernels.by_device import by_device
from cache_rank.kernels.sketch import reference

append_codes = by_device(reference.append_codes)
load_codes = by_device(reference.load_codes)
score_sketch = by_device(reference.score_sketch)
