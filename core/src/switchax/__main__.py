"""`python -m switchax`, the same as `switchax`."""

from .cli import main

if __name__ == "__main__":
    main()
