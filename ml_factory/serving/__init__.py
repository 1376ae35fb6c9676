"""HTTP service of bundles: predictions of raw bars, and feeds whose state survives a restart."""
