"""Studies of the policies, by simulation."""
