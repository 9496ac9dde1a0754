"""What is worth keeping of a prompt. Pure functions and small values: no I/O, no clock, no torch, no tokenizer.

`scope` reads the grammar, `history` holds recent prompts, `admission` knows more of them by the names of their blocks,
and `select` makes one `Selection` of all three.
"""
