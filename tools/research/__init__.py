"""How well the policies choose, by simulation."""
