"""A conversation with the model: the page `/chat`, and `diskprefix run` and `chat` in a terminal."""
