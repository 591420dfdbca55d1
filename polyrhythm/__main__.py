"""`python -m polyrhythm`, which is also how torchrun starts it."""

from polyrhythm.cli import main

main()
