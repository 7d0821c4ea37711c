"""The command line: `switchax`, or `python -m switchax`.

The only part of core that needs click and rich; `import switchax` loads neither.
"""

from .group import Group, main, make_group

__all__ = ["Group", "main", "make_group"]
