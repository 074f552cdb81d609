"""Many runs by one command: a run for each value of a list, or for each seed."""
