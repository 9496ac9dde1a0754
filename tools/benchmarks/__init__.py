"""`tools/bench`: programs that serve a model (engines), measurements of them (scenarios), and one report."""
