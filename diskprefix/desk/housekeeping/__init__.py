"""Care of a store: `diskprefix verify`, `purge`, `compact`, `backup` and `restore`."""
