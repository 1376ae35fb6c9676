"""Header of a safetensors file, joined and split without NumPy: a process that only copies files starts quickly."""

ALIGN = 64  # bytes; the tensors begin at a multiple of it


def join_safetensors_header(table: bytes) -> bytes:
    """Return the header with this JSON table: its length, the table, and spaces up to the tensors."""
    table += b" " * (-(8 + len(table)) % ALIGN)
    return len(table).to_bytes(8, "little") + table


def split_safetensors_header(file: memoryview) -> tuple[bytes, memoryview]:
    """Return (the JSON table, the bytes of the tensors) of a safetensors file."""
    end = 8 + int.from_bytes(file[:8], "little")
    return bytes(file[8:end]), file[end:]
