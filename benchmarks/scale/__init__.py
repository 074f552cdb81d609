"""What grows with the machine and the data: fleets, preparation, streaming."""
