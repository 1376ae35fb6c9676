"""What we ask, and how we judge fairly."""
