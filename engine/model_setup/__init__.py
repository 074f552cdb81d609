"""The model as the plan runs it: dropout keyed, activations recomputed, samples packed."""
