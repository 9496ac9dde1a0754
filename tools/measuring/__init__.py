"""The common parts of the programs: a real server, prompts, made-up KV, the page cache, tables."""
