"""Whether a run is what its recipe says."""
