"""Decodes one picture, as a program of its own that can be killed.

It is run by its path and imports only Pillow, so that it starts in 50 ms. It reads the file from standard input, and
writes the pixels of the first frame to standard output: 3 bytes each, turned upright.
"""

from __future__ import annotations

import io
import json
import resource
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

_LIMITS = {
    resource.RLIMIT_CPU: 30,
    resource.RLIMIT_AS: 2 << 30,
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_FSIZE: 0,
}


def main(folder: str, kind: str, turn: int | None, size: list[int], target_size: list[int]) -> None:
    """Decodes a picture of the format `kind` whose header has the size `size`, and scales it to `target_size`. `folder`
    has Pillow, and `turn` is one of its transpositions."""
    for limit, value in _LIMITS.items():
        resource.setrlimit(limit, (value, value))
    sys.path.append(folder)
    from PIL import Image

    # The daemon has checked the size.
    Image.MAX_IMAGE_PIXELS = None
    with Image.open(io.BytesIO(sys.stdin.buffer.read()), formats=[kind]) as image:
        pixels = _in_rgb(image)
    if list(pixels.size) != size:
        raise ValueError(f"its header said {size[0]}x{size[1]} pixels, and it has {pixels.width}x{pixels.height}")
    if turn is not None:
        pixels = pixels.transpose(Image.Transpose(turn))
    if list(pixels.size) != target_size:
        pixels = pixels.resize((target_size[0], target_size[1]), Image.Resampling.LANCZOS, reducing_gap=3.0)
    sys.stdout.buffer.write(pixels.tobytes())


def _in_rgb(image: Image) -> Image:
    """Returns an image in RGB. Transparent pixels get a white background, as on most pages."""
    from PIL import Image

    if image.mode.startswith("I"):
        # 16 bits of grey; a conversion would cut off all above 255.
        return image.convert("I").point(lambda value: value * (1 / 256)).convert("L").convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


if __name__ == "__main__":
    main(sys.argv[1], *json.loads(sys.argv[2]))
