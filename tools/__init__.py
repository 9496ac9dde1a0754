"""What a developer runs: see `tools/README.md`."""
