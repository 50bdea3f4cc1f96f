"""Antialiased lines and text on a canvas, written as PNG; needs only numpy."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

Color = tuple[int, int, int]
Point = tuple[float, float]

# Letters as strokes on a grid of 5 columns: "xy" points, baseline 2, small letters up to 6, capitals up to 8.
_GLYPHS = {
    "0": "12 03 07 18 38 47 43 32 12", "1": "17 28 22", "2": "07 18 38 47 46 02 42",
    "3": "07 18 38 47 46 35 15;35 44 43 32 12 03", "4": "32 38 04 44", "5": "48 08 05 35 44 43 32 12 03",
    "6": "47 38 18 07 03 12 32 43 44 35 15 04", "7": "08 48 12",
    "8": "15 06 07 18 38 47 46 35 15 04 03 12 32 43 44 35", "9": "03 12 32 43 47 38 18 07 06 15 35 46",
    "a": "06 36 45 42;44 14 03 12 32 43", "b": "08 02;05 16 36 45 43 32 12 03", "c": "45 36 16 05 03 12 32 43",
    "d": "48 42;45 36 16 05 03 12 32 43", "e": "04 44 45 36 16 05 03 12 32", "f": "38 28 17 12;06 36",
    "g": "46 41 30 10 01;45 36 16 05 03 12 32 43", "h": "08 02;05 16 36 45 42", "i": "26 22;28 28",
    "j": "26 21 10 00;28 28", "k": "08 02;36 04;14 42", "l": "28 22", "m": "06 02;05 16 25 22;25 36 45 42",
    "n": "06 02;05 16 36 45 42", "o": "16 05 03 12 32 43 45 36 16", "p": "06 00;05 16 36 45 43 32 12 03",
    "q": "46 40;45 36 16 05 03 12 32 43", "r": "06 02;05 16 36", "s": "45 36 16 05 14 34 43 32 12 03",
    "t": "18 13 22 32;06 36", "u": "06 03 12 32 43;46 42", "v": "06 22 46", "w": "06 12 25 32 46", "x": "06 42;46 02",
    "y": "06 23;46 23 10", "z": "06 46 02 42", "A": "02 28 42;14 34", "B": "02 08 38 47 46 35 05;35 44 43 32 02",
    "C": "47 38 18 07 03 12 32 43", "D": "02 08 28 46 44 22 02", "E": "48 08 02 42;05 35", "F": "48 08 02;05 35",
    "G": "47 38 18 07 03 12 32 43 45 25", "H": "08 02;48 42;05 45", "I": "28 22", "J": "48 43 32 12 03",
    "K": "08 02;48 05 42", "L": "08 02 42", "M": "02 08 25 48 42", "N": "02 08 42 48",
    "O": "12 03 07 18 38 47 43 32 12", "P": "02 08 38 47 46 35 05", "Q": "12 03 07 18 38 47 43 32 12;24 42",
    "R": "02 08 38 47 46 35 05;25 42", "S": "47 38 18 07 06 15 35 44 43 32 12 03", "T": "08 48;28 22",
    "U": "08 03 12 32 43 48", "V": "08 22 48", "W": "08 12 26 32 48", "X": "08 42;48 02", "Y": "08 25 48;25 22",
    "Z": "08 48 02 42", ".": "22 22", ",": "22 11", ":": "25 25;23 23", "/": "02 48", "-": "05 45", "_": "01 41",
    "+": "05 45;27 23", "%": "02 48;07 17;33 43", "(": "38 26 24 32", ")": "18 26 24 12", "=": "06 46;04 44",
    "@": "42 12 03 07 18 38 47 44 24 26 46", "?": "07 18 38 47 46 25 24;22 22",
}  # fmt: skip
_ADVANCE = 6.0  # grid columns from one letter to the next


class Canvas:
    """A picture of `width` x `height` pixels; the origin is the upper left corner."""

    def __init__(self, width: int, height: int, background: Color = (255, 255, 255)) -> None:
        self.width, self.height = width, height
        self.pixels = np.empty((height, width, 3), dtype=np.float32)
        self.pixels[:] = background

    def line(self, points: Sequence[Point], color: Color, thickness: float = 1.0, alpha: float = 1.0) -> None:
        """A polyline with round ends; each pixel is covered by its distance to the line, so edges are smooth."""
        reach = thickness / 2 + 1
        xs, ys = [p[0] for p in points], [p[1] for p in points]
        left, right = max(int(min(xs) - reach), 0), min(int(max(xs) + reach) + 2, self.width)
        top, bottom = max(int(min(ys) - reach), 0), min(int(max(ys) + reach) + 2, self.height)
        if left >= right or top >= bottom:
            return
        cover = np.zeros((bottom - top, right - left), dtype=np.float32)
        for (x0, y0), (x1, y1) in zip(points, [*points[1:], points[-1]], strict=True):
            i0, i1 = max(int(min(x0, x1) - reach), left), min(int(max(x0, x1) + reach) + 2, right)
            j0, j1 = max(int(min(y0, y1) - reach), top), min(int(max(y0, y1) + reach) + 2, bottom)
            if i0 >= i1 or j0 >= j1:
                continue
            px, py = np.meshgrid(np.arange(i0, i1) + 0.5, np.arange(j0, j1) + 0.5)
            dx, dy = x1 - x0, y1 - y0
            along = np.clip(((px - x0) * dx + (py - y0) * dy) / max(dx * dx + dy * dy, 1e-9), 0, 1)
            distance = np.hypot(px - x0 - along * dx, py - y0 - along * dy)
            part = cover[j0 - top : j1 - top, i0 - left : i1 - left]
            np.maximum(part, np.clip(thickness / 2 + 0.5 - distance, 0, 1), out=part)
        area = self.pixels[top:bottom, left:right]
        share = (cover * alpha)[..., None]
        area *= 1 - share
        area += share * np.asarray(color, dtype=np.float32)

    def text(self, x: float, y: float, text: str, color: Color, size: float = 12, align: str = "left") -> None:
        """Letters of `size` pixels, `y` their baseline; characters without a glyph show as a question mark."""
        scale = size / 8
        x -= {"left": 0.0, "middle": 0.5, "right": 1.0}[align] * text_width(text, size)
        for number, letter in enumerate(text):
            if letter == " ":
                continue
            for stroke in _GLYPHS.get(letter, _GLYPHS["?"]).split(";"):
                points = [
                    (x + (number * _ADVANCE + int(p[0])) * scale, y - (int(p[1]) - 2) * scale) for p in stroke.split()
                ]
                self.line(points, color, max(size / 9, 1.0))

    def save(self, path: Path) -> None:
        """Write the picture as PNG."""
        rows = np.clip(self.pixels + 0.5, 0, 255).astype(np.uint8).reshape(self.height, self.width * 3)
        data = np.concatenate([np.zeros((self.height, 1), dtype=np.uint8), rows], axis=1).tobytes()
        header = struct.pack(">IIBBBBB", self.width, self.height, 8, 2, 0, 0, 0)
        chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(data, 9)), (b"IEND", b""))
        Path(path).write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, body) for name, body in chunks))


def text_width(text: str, size: float) -> float:
    """Width of a text in pixels."""
    return max(len(text) * _ADVANCE - 2, 0) * size / 8


def _chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
