"""The programs for developers: see `tools/README.md`."""
