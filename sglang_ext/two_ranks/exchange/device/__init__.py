"""The exchange between two GPUs: queued on side streams, gated by flags, never waited for."""
