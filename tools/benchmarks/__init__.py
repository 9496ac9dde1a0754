"""`tools/bench`: programs that serve a model (engines), what is measured of them (scenarios), and one report."""
