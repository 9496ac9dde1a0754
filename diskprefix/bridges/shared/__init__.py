"""Chunks of other engines in the store, and the settings, the opening and the identities that the bridges share."""
