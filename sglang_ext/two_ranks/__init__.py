"""Selection by a second process, the cache rank, on a GPU of its own.

SGLang's scheduler process is the inference rank. Here is what it does: requests become sequences,
their K and V go to the cache rank, and what it selects comes back into slots before each layer.
"""
