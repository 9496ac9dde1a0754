"""Other programs that serve a model, so that `tools/bench peers` can measure them beside the daemon."""
