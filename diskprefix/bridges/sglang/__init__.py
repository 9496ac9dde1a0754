"""The store as a storage backend of SGLang's HiCache. SGLang imports `hicache_backend`. See README.md."""
