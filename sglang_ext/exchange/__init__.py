"""The inference rank's side of a decode step's exchange, for CPUs and for GPUs."""
