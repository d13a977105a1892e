"""What residency formats lose and what they cost: measured beside each other, without a server."""
