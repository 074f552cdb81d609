"""The workloads: a model, a loss and an evaluation each. They import torch, never the engine."""
