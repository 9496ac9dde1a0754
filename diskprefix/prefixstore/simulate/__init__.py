"""Replays recorded requests with other settings, with the steps of the store and the cache."""
