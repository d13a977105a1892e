"""What the cache rank did: recordings and timelines."""
