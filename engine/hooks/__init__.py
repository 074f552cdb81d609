"""The hooks of a run, one file each. None imports another: what two of them need stands in `Training`."""
