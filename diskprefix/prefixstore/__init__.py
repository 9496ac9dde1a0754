"""The store of prefixes: on disk, in memory, in a bucket."""
