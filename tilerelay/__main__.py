"""`python -m tilerelay`."""

from tilerelay.cli import main

if __name__ == "__main__":
    main()
