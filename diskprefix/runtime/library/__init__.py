"""The library: `diskprefix.PrefixCacheSession`, a prefix cache around a transformers model without the server."""
