"""Daemons that are killed, and what is done to a store by processes that a power failure ends."""
