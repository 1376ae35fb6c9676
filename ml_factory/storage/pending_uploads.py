"""Uploads that this process gave up: files on the local disk only, uploaded by the next session."""

_pending: dict[tuple, str] = {}


def mark_upload_pending(key: tuple, description: str) -> None:
    """Record that this process does not retry an upload; `safe_stop` reports the description."""
    _pending[key] = description


def clear_pending_upload(key: tuple) -> None:
    """Record that an upload succeeded after all, or is not needed any more."""
    _pending.pop(key, None)


def list_pending_uploads() -> list[str]:
    """List the descriptions of all uploads that this process gave up, sorted."""
    return sorted(_pending.values())
