"""llama.cpp's library as a runtime: any `.gguf` file, on any device that it computes on. See README.md."""
