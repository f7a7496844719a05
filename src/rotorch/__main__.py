"""`python -m rotorch` is `rotorch`."""

from rotorch.cli import main

if __name__ == "__main__":
    main()
