"""Runtimes: they compute a model, and find, read and load its files."""
