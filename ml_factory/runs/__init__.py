"""What outlives the machine."""
