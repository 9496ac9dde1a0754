"""Files of the shapes that people run, with random numbers, so that `tools/bench shapes` needs no model hub."""
