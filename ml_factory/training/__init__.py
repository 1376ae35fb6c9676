"""The one loop."""
