"""MosaicKV: the largest elements of rotated keys and values, by segments of tokens."""
