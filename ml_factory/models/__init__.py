"""Forward passes and boosters."""
