"""Selection inside SGLang's own process, in place of a cache rank.

The KV cache stays in SGLang's pool. Every pool row of a sparse layer has a sketch of its key, which
is written where the key is. A decode step scores the sketches by its own queries, picks tokens, and
attends to their rows, all in the captured graph: no message, no copy of K and V, no work of the
host.
"""
