"""What sparse decode costs a served language model: of texts that it reads, and that it writes."""
