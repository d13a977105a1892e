"""Exact decoding: selection drafts tokens, and one dense forward pass verifies them.

    algorithm    what SGLang's registry of speculative algorithms knows
    placement    what selects for drafts
    worker       a round of decoding, from top to bottom
    forwards     the three forward passes of a round, and their CUDA graphs
    sampling     tokens drawn with noise that drafts and verification share
    acceptance   how many drafts a verification confirms, and what comes of it
    number       how many drafts a round has

After QuantSpec (arXiv 2502.10424, section 4.1): the draft is the model itself over a part of the
KV cache, chosen here anew for each token.
"""
