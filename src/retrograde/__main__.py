"""`python -m retrograde`: the command line."""

from retrograde.cli import main

if __name__ == "__main__":
    main()
