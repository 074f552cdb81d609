"""Cleaning of text: the steps of --clean."""
