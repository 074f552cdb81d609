"""The command line and the ways to start a run. Nothing here imports torch before a run begins."""
