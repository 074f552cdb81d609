"""What all tasks on encoders share: sizes, cutting, rounding, measuring, exporting."""
