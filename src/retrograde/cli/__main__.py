"""`python -m retrograde.cli`."""

from . import main

main()
