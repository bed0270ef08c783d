"""Files of lines, plain or packed with gzip or zstd."""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from pagetable.replay.trace import TraceError

MAX_LINE_BYTES = 256 << 20


def read_line(lines: BinaryIO, file: Path, number: int) -> bytes:
    """The next line; TraceError where a packed file is damaged or ends too early, after so many lines."""
    with _unpacking(file, number):
        return lines.readline(MAX_LINE_BYTES)


def read_rest(lines: BinaryIO, file: Path, number: int) -> bytes:
    """All that is left, within the limit of a line; TraceError as for a line."""
    with _unpacking(file, number):
        return lines.read(MAX_LINE_BYTES)


@contextmanager
def _unpacking(file: Path, number: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # each way of packing has errors of its own
        raise TraceError(f"{file}, after line {number}: it cannot be unpacked: {error}") from error


def open_packed(path: Path) -> BinaryIO:
    """A file to read bytes from, unpacked if it is packed. OSError if it cannot be; TraceError for a lack of zstd."""
    file = path.open("rb")
    magic = file.peek(4)[:4]
    if magic[:2] == b"\x1f\x8b":
        file.close()
        return cast(BinaryIO, gzip.open(path))
    if magic == b"\x28\xb5\x2f\xfd":
        try:
            import zstandard
        except ImportError:
            file.close()
            raise TraceError(f"{path}: it is packed with zstd: pip install zstandard, or unpack it first") from None
        return io.BufferedReader(_Zstandard(file, zstandard.ZstdDecompressor()))
    return file


class _Zstandard(io.RawIOBase):
    """Unpacks a file of one or more frames. Unlike the library's own reader it tells a cut file from a whole one."""

    def __init__(self, file: BinaryIO, decompressor: Any) -> None:
        self._file, self._decompressor = file, decompressor
        self._frame: Any = None  # that is being unpacked
        self._packed = self._data = b""

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill some of the buffer; 0 at the end."""
        while not self._data:
            self._packed = self._packed or self._file.read(128)  # a few bytes may unpack to very many
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("it ends in the middle")
                return 0
            frame = self._frame or self._decompressor.decompressobj()
            self._data = frame.decompress(self._packed)
            self._packed = frame.unused_data if frame.eof else b""
            self._frame = None if frame.eof else frame
        size = min(len(buffer), len(self._data))
        buffer[:size], self._data = self._data[:size], self._data[size:]
        return size

    def close(self) -> None:
        """Close the file as well."""
        self._file.close()
        super().close()
