"""The run folder and what is written there."""
