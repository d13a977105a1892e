"""Tokens that are held as codes: written, read and scored, in whichever format their codec has."""

from cache_rank.kernels.by_device import by_device
from cache_rank.kernels.coded import reference

encode_groups = by_device(reference.encode_groups)
gather_codes = by_device(reference.gather_codes)
score_codes = by_device(reference.score_codes)
