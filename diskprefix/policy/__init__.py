"""What is worth keeping of a prompt. Pure functions and small values: no I/O, no clock, no torch, no tokenizer.

`scope` reads the grammar, `boundary` finds the positions where a prompt may be cut, `history` remembers recent prompts,
and `select` puts the three together into one `Selection`.
"""
