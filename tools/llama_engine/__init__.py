"""`tools/llama`: llama.cpp's library in an environment of its own, and what its engine must hold there."""
