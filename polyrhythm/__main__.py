"""Run the command as `python -m polyrhythm`, also under torchrun."""

from polyrhythm.cli import main

main()
