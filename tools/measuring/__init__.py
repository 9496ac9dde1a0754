"""What several tools measure with: a real server, made-up KV, the page cache, tables."""
