"""HTTP and WebSocket service of bundles: requests, feeds whose state survives a restart, limits, metrics, hot swap."""
