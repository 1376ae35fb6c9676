"""Files that survive: local disks, mounts and buckets; locks, the workspace, artifacts by content hash."""
