"""From a command line to a trained run, on this machine."""
