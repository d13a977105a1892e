"""Tokens that are held as codes, in whichever format: written, read, scored, attended to."""

from cache_rank.kernels.by_device import by_device
from cache_rank.kernels.coded import reference

attend_codes = by_device(reference.attend_codes)
encode_groups = by_device(reference.encode_groups)
gather_codes = by_device(reference.gather_codes)
score_codes = by_device(reference.score_codes)
