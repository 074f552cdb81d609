"""What to measure first where a GPU is at hand, in parts of a few minutes: `make gpu`."""
