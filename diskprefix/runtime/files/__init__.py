"""Reads the files of a model."""
