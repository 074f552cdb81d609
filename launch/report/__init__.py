"""Runs and models side by side."""
