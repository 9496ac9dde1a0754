"""The store as LMCache's second level (L2). LMCache imports `l2_adapter`. See README.md."""
