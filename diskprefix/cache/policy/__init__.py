"""What is worth keeping of a prompt. Pure functions and small values: no I/O, no clock, no torch, no tokenizer."""
