"""Optimizers, learning-rate schedules, lengths of phases, early stopping."""
