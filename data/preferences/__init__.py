"""Pairs of answers to one prompt, of which one is preferred."""
