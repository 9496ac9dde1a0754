"""The clients of `tools/bench hostile`, and the measurements beside them."""
