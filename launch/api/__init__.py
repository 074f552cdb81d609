"""isobatch from Python: what the command line does, as functions that leave the process as it was."""
