"""`python -m tests.faults.small_packed`: `diskprefix`, which also keeps the packed weights of small models."""

from diskprefix.daemon.cli import main
from diskprefix.runtime.load import packed_weights

packed_weights.LEAST_BYTES = 0
main()
