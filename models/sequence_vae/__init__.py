"""Variational autoencoders over sequences, and a monitor that sees their posterior collapse."""
