"""The models that a daemon knows by name."""
