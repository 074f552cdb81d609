"""The processes of a run: communication, liveness, stop signals."""
