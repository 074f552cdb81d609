"""Runs from outside, while they wait, train or have ended: what they do, their logs, their end."""
