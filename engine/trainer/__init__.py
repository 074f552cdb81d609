"""Trains a run: its hooks, its phases, and what it writes at the end."""
