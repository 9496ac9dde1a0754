"""llama.cpp's library as an engine: any `.gguf` file, on any device that it computes on. See README.md."""
