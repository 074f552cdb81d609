"""The processes of a run: communication, lookout, watchdog, stop signals."""
