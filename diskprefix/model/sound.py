"""WAV files as mono samples at the rate that a model wants, in memory that does not grow with the file.

Python's `wave` module refuses common headers before 3.12, and raises errors of any class for a damaged file.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

Samples: TypeAlias = "npt.NDArray[np.float32]"

SAMPLE_RATES = range(4000, 192_001)
_PCM, _EXTENSIBLE = 1, 0xFFFE
_PCM_SUBFORMAT = bytes.fromhex("0100000000001000800000aa00389b71")
_UNKNOWN_BYTES = 0xFFFF_FFFF
"""Programs that cannot seek back write this length: the samples go on to the end of the file."""
_MOST_CHUNKS = 1000
_SAMPLE_TYPES = {1: "u1", 2: "<i2", 3: "<i4", 4: "<i4"}
"""numpy's type by the bytes of a sample. Samples of three bytes are padded to four."""
_STEP_S, _MARGIN_S = 6, 1
"""Sound is resampled in steps of whole seconds, so that every step begins on a sample of both rates."""


@dataclass(frozen=True, eq=False)
class Wav:
    """PCM samples as they are in a WAV file. `data` is a view of the file's bytes; nothing is decoded yet."""

    rate: int
    num_channels: int
    width: int
    """Bytes of a sample."""
    data: memoryview

    @classmethod
    def read(cls, content: bytes) -> Wav:
        """Raises `ValueError` for a file that is damaged or of another kind."""
        chunks = _chunks(content)
        rate, num_channels, width = _format(chunks.get(b"fmt ", (0, memoryview(b"")))[1])
        if rate not in SAMPLE_RATES:
            raise ValueError(f"{rate} samples a second are out of range ({SAMPLE_RATES[0]} to {SAMPLE_RATES[-1]})")
        num_bytes, data = chunks.get(b"data", (0, memoryview(b"")))
        if len(data) < num_bytes != _UNKNOWN_BYTES:
            raise ValueError(f"is cut short: {len(data)} of {num_bytes} bytes of sound are there")
        sound = cls(rate, num_channels, width, data)
        if not sound.num_frames:
            raise ValueError("holds no sound")
        return sound

    @property
    def num_frames(self) -> int:
        return len(self.data) // (self.num_channels * self.width)

    @property
    def seconds(self) -> float:
        return self.num_frames / self.rate

    def resampled(self, wanted: int) -> Samples:
        """Returns the sound at `wanted` samples a second: the mean of its channels in [-1, 1], shape [samples]."""
        samples = np.empty(max(1, round(self.num_frames * wanted / self.rate)), np.float32)
        for second in range(0, -(-self.num_frames // self.rate), _STEP_S):
            part = samples[second * wanted : (second + _STEP_S) * wanted]
            part[:] = self._step(second, wanted)[: len(part)]
        return samples

    def _step(self, second: int, wanted: int) -> Samples:
        """Returns `_STEP_S` seconds from `second` on at another rate, with silence after the end.

        The spectrum of the step is cut or padded with zeros and transformed back. The transform treats the sound as one
        that repeats, so the step has a margin on both sides that fades out.
        """
        if self.rate == wanted:
            return self._mono(second * wanted, (second + _STEP_S) * wanted)
        whole_s = _STEP_S + 2 * _MARGIN_S
        begin = (second - _MARGIN_S) * self.rate
        samples = self._mono(begin, begin + whole_s * self.rate)
        fade = np.sin(np.linspace(0, np.pi / 2, _MARGIN_S * self.rate, dtype=np.float32)) ** 2
        samples[: len(fade)] *= fade
        samples[-len(fade) :] *= fade[::-1]
        num_wanted = whole_s * wanted
        sound = np.fft.irfft(np.fft.rfft(samples)[: num_wanted // 2 + 1], num_wanted)
        kept: Samples = sound[_MARGIN_S * wanted : -_MARGIN_S * wanted].astype(np.float32) * np.float32(
            wanted / self.rate
        )
        return kept

    def _mono(self, begin: int, end: int) -> Samples:
        """Returns the frames from `begin` to `end` as samples, with silence outside the sound."""
        first, last = max(begin, 0), min(end, self.num_frames)
        frame_bytes = self.num_channels * self.width
        raw = np.frombuffer(self.data[first * frame_bytes : last * frame_bytes], np.uint8)
        width = self.width
        if width == 3:
            # With a zero as the lowest of four bytes, the sample is 256 times as large.
            padded = np.zeros((len(raw) // 3, 4), np.uint8)
            padded[:, 1:] = raw.reshape(-1, 3)
            raw, width = padded.reshape(-1), 4
        means = raw.view(_SAMPLE_TYPES[width]).reshape(-1, self.num_channels).mean(axis=1, dtype=np.float32)
        samples = np.zeros(end - begin, np.float32)
        # Samples of one byte are unsigned, all others signed.
        samples[first - begin : last - begin] = means / np.float32(2 ** (8 * width - 1)) - np.float32(width == 1)
        return samples


def _chunks(content: bytes) -> dict[bytes, tuple[int, memoryview]]:
    """Returns the first chunk of each name: the length in its header, and the bytes that are there."""
    if content[:4] != b"RIFF" or content[8:12] != b"WAVE":
        raise ValueError("is not a WAV file with PCM samples")
    found: dict[bytes, tuple[int, memoryview]] = {}
    at, view = 12, memoryview(content)
    for _ in range(_MOST_CHUNKS):
        if at + 8 > len(content) or b"data" in found:
            break
        name, num_bytes = struct.unpack_from("<4sI", content, at)
        found.setdefault(name, (num_bytes, view[at + 8 : at + 8 + num_bytes]))
        # Chunks begin at even places.
        at += 8 + num_bytes + num_bytes % 2
    return found


def _format(chunk: memoryview) -> tuple[int, int, int]:
    """Returns the samples a second, the number of channels and the bytes of a sample."""
    if len(chunk) < 16:
        raise ValueError("is not a WAV file with PCM samples: its header is cut short")
    tag, num_channels, rate, _, frame_bytes, bits = struct.unpack_from("<HHIIHH", chunk)
    if tag == _EXTENSIBLE and chunk[24:40] == _PCM_SUBFORMAT:
        tag = _PCM
    if tag != _PCM:
        raise ValueError(f"is not a WAV file with PCM samples: its samples are of the format {tag}")
    width = (bits + 7) // 8
    if width not in _SAMPLE_TYPES:
        raise ValueError(f"has {bits}-bit samples; 8, 16, 24 and 32 are read")
    if frame_bytes != num_channels * width or not num_channels:
        raise ValueError(f"is damaged: {num_channels} channels of {bits} bits do not take {frame_bytes} bytes")
    return rate, num_channels, width
