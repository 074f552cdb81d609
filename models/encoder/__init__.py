"""BERT-like encoders, shared by their workloads: sizes, pruning, quantization, evaluation, export."""
