"""The workload classifier, and knowledge distillation."""
