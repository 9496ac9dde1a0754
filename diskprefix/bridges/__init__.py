"""The store under other engines: vLLM, LMCache and SGLang load these modules by name."""
