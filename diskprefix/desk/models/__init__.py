"""The models that a daemon serves by name, and the commands that fetch, list, show and remove models."""
