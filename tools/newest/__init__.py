"""Newer versions of the packages of which more is used than they promise."""
