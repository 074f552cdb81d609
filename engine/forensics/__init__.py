"""What happened in a run: which step saw a sample, one step again, where two runs part."""
