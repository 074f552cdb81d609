"""The workload classifier, and knowledge distillation. From counts: models/encoder/class_metrics.py."""
