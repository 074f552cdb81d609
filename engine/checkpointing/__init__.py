"""State on disk, by parameter name."""
