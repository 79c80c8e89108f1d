"""`python -m flashsmith` is the `flashsmith` command."""

from __future__ import annotations

from flashsmith.cli import main

if __name__ == "__main__":
    main()
