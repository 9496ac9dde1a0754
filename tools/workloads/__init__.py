"""Workloads for the simulator: published data, and generators for what these lack."""
