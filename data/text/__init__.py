"""Data for language models: plain text, conversations, and mixtures of them."""
