"""Answers of finished models for rows of files, in a terminal or a file."""
