"""The route `/infill` of llama.cpp's server, which the completion plugins of editors call."""
