"""Optimizers, learning rates, lengths of phases, early stopping."""
