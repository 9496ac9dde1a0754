"""The clients of `tools/bench hostile`, and what is measured beside them."""
