"""The C++ operators, and the size of the blocks in which they take matrices."""

ROWS, COLUMNS = 16, 32
"""The size of a block. A matrix has a multiple of both."""
