"""The programs that `tools/bench` runs: benchmarks, matrices, research, and measures of the code."""
