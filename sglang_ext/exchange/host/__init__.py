"""The exchange between ranks that are CPU processes: the host itself waits, sends and scatters."""
