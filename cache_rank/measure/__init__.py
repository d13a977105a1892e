"""Measures what the cache rank does: the recall of selections, recordings, timelines."""
