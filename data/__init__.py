"""Data: readers, tokenizers, and the kinds of data that tasks train on. It imports nothing of the engine."""
