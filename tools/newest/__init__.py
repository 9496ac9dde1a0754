"""Newer versions of the packages whose undocumented parts are used."""
