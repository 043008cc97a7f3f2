"""What every server needs once."""
