"""Raw bars: reading, checking, calendars, futures rolls, resampling and synthetic markets."""
