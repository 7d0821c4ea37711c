"""The one version number of the repository."""

__version__ = "0.1.0"
