"""Text to learn a language model from."""
