"""The pictures of the pages that are drawn: a recorded session, and the nouns of the cache."""
