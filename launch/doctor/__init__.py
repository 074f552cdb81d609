"""`doctor`: what is wrong with this machine or with a run, each found by trying it."""
