"""The policy: how much of a prompt to keep. Pure functions and small values: no I/O, no clock, no torch, no
tokenizer."""
