"""The processes of a run: communication, watchdog, stop signals."""
