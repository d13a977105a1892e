"""`mosaickv`: rotated keys and values, of which each keeps its largest elements (MosaicKV 4-5).

residency   the format, as the selector drives it, and its options
segments    which strategy each token of a sequence has, and when
strategy    how the tokens of a segment are compressed
memory      pages of packed vectors, rings of newest tokens, tables of strategies
"""

from cache_rank.residency.mosaickv.residency import MosaicKVResidency

__all__ = ["MosaicKVResidency"]
