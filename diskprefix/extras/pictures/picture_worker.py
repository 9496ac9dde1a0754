"""The program that decodes one picture, in a process that can be ended.

It is run by its path and imports nothing but Pillow, so that it starts in a twentieth of a second. It reads the file
from standard input, and writes the pixels of its first frame to standard output: 3 bytes each, turned upright.
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


def main(folder: str, kind: str, turn: int | None, found: list[int], wanted: list[int]) -> None:
    """Decodes a picture of the format `kind`, of which the header said the size `found`. `folder` has Pillow, `turn`
    is one of its transpositions, and the pixels are scaled to the size `wanted`."""
    for limit, value in _LIMITS.items():
        resource.setrlimit(limit, (value, value))
    sys.path.append(folder)
    from PIL import Image

    # The daemon has looked at the size.
    Image.MAX_IMAGE_PIXELS = None
    with Image.open(io.BytesIO(sys.stdin.buffer.read()), formats=[kind]) as image:
        pixels = _in_rgb(image)
    if list(pixels.size) != found:
        raise ValueError(f"its header said {found[0]}x{found[1]} pixels, and it has {pixels.width}x{pixels.height}")
    if turn is not None:
        pixels = pixels.transpose(Image.Transpose(turn))
    if list(pixels.size) != wanted:
        pixels = pixels.resize((wanted[0], wanted[1]), Image.Resampling.LANCZOS, reducing_gap=3.0)
    sys.stdout.buffer.write(pixels.tobytes())


def _in_rgb(image: Image) -> Image:
    """Returns red, green and blue. What can be seen through lies on white, as on most pages."""
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
