"""Real tokenizers and real chat templates of many model families, for tests of what a prompt's boundaries are."""
