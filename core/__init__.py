"""The bottom layer, which every other room may import: records, flags, errors, small files. No torch."""
