"""GGUF files with tensors of any type, which the library `gguf` may not know."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

_ALIGNMENT = 32


def write_tensors(path: Path, tensors: Mapping[str, tuple[int, tuple[int, ...], bytes]]) -> Path:
    """Writes a file without metadata. `tensors` are the number of the type, the shape and the content by names."""
    header, content = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), 0), b""
    for name, (number, shape, data) in tensors.items():
        header += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(shape))
        header += struct.pack(f"<{len(shape)}QIQ", *shape[::-1], number, len(content))
        content += data + bytes(-len(data) % _ALIGNMENT)
    path.write_bytes(header + bytes(-len(header) % _ALIGNMENT) + content)
    return path
