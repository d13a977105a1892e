"""The cache rank: holds the KV cache, predicts the next query, selects tokens, ships what changed.

Imports nothing of SGLang.
"""
