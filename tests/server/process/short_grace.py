"""`python -m tests.server.process.short_grace`: `diskprefix`, whose last requests get a second to finish."""

from diskprefix.cli import main
from diskprefix.server.process import process

process.GRACE_S = 1.0
main()
