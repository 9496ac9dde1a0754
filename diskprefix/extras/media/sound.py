"""Reads WAV files as mono samples at the rate that a model wants, block by block."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

Samples: TypeAlias = "npt.NDArray[np.float32]"

SAMPLE_RATES = range(4000, 192_001)
_SUBTYPES = ("PCM_U8", "PCM_16", "PCM_24", "PCM_32")
_UNKNOWN_BYTES = 0xFFFF_FFFF
"""The length that a program writes if it cannot seek back: the samples end with the file."""
_BLOCK_S = 6


class Wav:
    """A WAV file with PCM samples. Only its header is read until `resampled`."""

    def __init__(self, content: bytes) -> None:
        """Raises `ValueError` for a file that is damaged or of another kind."""
        import soundfile

        # libsndfile guesses the format, and knows dozens whose decoders are less tested.
        if content[:4] != b"RIFF" or content[8:12] != b"WAVE":
            raise ValueError("is not a WAV file with PCM samples")
        try:
            self._file: Any = soundfile.SoundFile(io.BytesIO(content))
        except soundfile.LibsndfileError as error:
            raise ValueError(f"is not a WAV file with PCM samples: {error.error_string}") from error
        num_bytes = 8 + int.from_bytes(content[4:8], "little")
        if len(content) < num_bytes != 8 + _UNKNOWN_BYTES:
            raise ValueError(f"is cut short: {len(content)} of {num_bytes} bytes are there")
        if self._file.subtype not in _SUBTYPES:
            raise ValueError(f"is not a WAV file with PCM samples: its samples are of the format {self._file.subtype}")
        self.rate = int(self._file.samplerate)
        self.num_frames = int(self._file.frames)
        if self.rate not in SAMPLE_RATES:
            raise ValueError(f"{self.rate} samples a second are out of range ({SAMPLE_RATES[0]} to {SAMPLE_RATES[-1]})")
        if not self.num_frames:
            raise ValueError("holds no sound")

    @property
    def seconds(self) -> float:
        return self.num_frames / self.rate

    def num_samples(self, rate: int) -> int:
        """Returns how many samples the sound has at `rate` samples a second."""
        return max(1, round(self.num_frames * rate / self.rate))

    def resampled(self, rate: int) -> Samples:
        """Returns the sound at `rate` samples a second: the mean of its channels in [-1, 1], shape [samples]."""
        import soxr

        stream = soxr.ResampleStream(self.rate, rate, 1)
        samples = np.zeros(self.num_samples(rate), np.float32)
        start = self._file.seek(0)
        while len(frames := self._file.read(_BLOCK_S * self.rate, dtype="float32", always_2d=True)):
            is_last = self._file.tell() >= self.num_frames
            part = stream.resample_chunk(frames.mean(axis=1), last=is_last)[: len(samples) - start]
            samples[start : start + len(part)] = part
            start += len(part)
        return samples
