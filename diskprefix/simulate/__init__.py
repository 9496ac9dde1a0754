"""Replays recorded and made-up workloads against the real policy and eviction code, without a model."""
