"""What the market said."""
