"""The commands that ask what happened in a run."""
