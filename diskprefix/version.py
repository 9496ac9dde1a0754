"""The version of diskprefix, apart from the package: whoever wants it need not import the library."""

__version__ = "0.1.0"
