"""Labelled texts: columns, rows, classes, tokens."""
