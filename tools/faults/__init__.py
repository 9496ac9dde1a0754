"""Matrices: restores, crashes, damage, threads and requests that must lead to no wrong byte and no failure."""
