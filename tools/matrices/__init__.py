"""What must hold in every cell: architectures, damaged files, killed processes."""
