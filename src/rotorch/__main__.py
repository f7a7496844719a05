"""`python -m rotorch`, which is the `rotorch` command."""

from rotorch.core.phase_line import tell_phase


def main() -> None:
    """Shows at once that the command has begun, then loads it: that takes a quarter of a second, more on a busy day."""
    tell_phase("starting")
    from rotorch.cli import main as command

    tell_phase()
    command()


if __name__ == "__main__":
    main()
