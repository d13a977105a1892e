"""Exact decoding: selection drafts tokens, and one dense forward pass verifies them.

After QuantSpec (arXiv 2502.10424, section 4.1): the draft is the model itself over a part of the
KV cache, chosen here anew for each token.
"""
