"""One file per kind of data. Knows arrays, never the engine."""
