"""What everything may import: the record types, flags, errors and small files. No torch."""
