"""What a recipe costs on a machine, machines and modes side by side, what other batches bring."""
