"""Real models for checks and benchmarks."""
