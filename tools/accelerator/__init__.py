"""`tools/gpu`: exactness and speed on whatever accelerator a machine has."""
