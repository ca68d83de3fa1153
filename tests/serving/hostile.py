"""Image files that are small and want to keep a decoder busy, or are not what they say: each with
the status of the answer, and a word of its sentence."""

import io
import struct
import zlib

from PIL import Image


def encoded(image, form="JPEG", **how):
    memory = io.BytesIO()
    image.save(memory, form, **how)
    return memory.getvalue()


def flat(width, height, form="JPEG", mode="RGB", **how):
    return encoded(Image.new(mode, (width, height)), form, **how)


# JPEG


def many_scans(count, width=4000, height=4000, **how):
    """Progressive, with its last scan `count` times more. Each is a pass over all pixels."""
    data = flat(width, height, progressive=True, **how)
    scan = data[data.rfind(b"\xff\xda") : -2]
    return data[:-2] + scan * count + b"\xff\xd9"


def separate_scans(count, side=3000):
    """Not progressive, but with a scan for each component, and those again and again."""
    data = flat(side, side, subsampling=0)
    at = data.rfind(b"\xff\xda")
    ids = [data[data.rfind(b"\xff\xc0") + 10 + 3 * number] for number in range(3)]
    scans = [
        b"\xff\xda\0\x08\1" + bytes((each, 0x11 * (number > 0))) + b"\0\x3f\0" + data[at + 14 : -2]
        for number, each in enumerate(ids)
    ]
    return data[:at] + b"".join(scans) * count + b"\xff\xd9"


def segments(count, body):
    """With `count` empty segments before the first."""
    return flat(64, 64)[:20] + body * count + flat(64, 64)[20:]


def sized(data, width, height):
    """A JPEG that claims another size."""
    at = data.rfind(b"\xff\xc0") + 5
    return data[:at] + struct.pack(">HH", height, width) + data[at + 4 :]


# PNG


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, *chunks, depth=8, colour=2, rows=b""):
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    data = chunk(b"IDAT", zlib.compress(rows or bytes((1 + 3 * width) * height), 9))
    begin = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
    return begin + b"".join(chunks) + data + chunk(b"IEND", b"")


BOMB = zlib.compress(bytes(64 << 20), 9)  # 64 KiB that become 64 MiB
PROFILE = chunk(b"iCCP", b"p\0\0" + zlib.compress(bytes(1000 << 10), 9))


# TIFF


def tiff(tags, *bodies):
    """A TIFF of tags {number: (type, values)}; `bodies` follow its header at once."""
    body = b"".join(bodies)
    entries = b""
    codes = {1: "B", 3: "H", 4: "I"}
    start = 8 + len(body)
    rest = b""
    behind = start + 2 + 12 * len(tags) + 4
    for number, (kind, values) in sorted(tags.items()):
        packed = struct.pack(f"<{len(values)}{codes[kind]}", *values)
        if len(packed) > 4:
            rest, packed = rest + packed, struct.pack("<I", behind + len(rest))
        entries += struct.pack("<HHI", number, kind, len(values)) + packed.ljust(4, b"\0")
    directory = struct.pack("<H", len(tags)) + entries + bytes(4)
    return struct.pack("<2sHI", b"II", 42, start) + body + directory + rest


def tiff_of(width, height, more=(), **bodies):
    usual = {
        256: (4, [width]),
        257: (4, [height]),
        258: (3, [8]),
        259: (3, [1]),
        262: (3, [1]),
        273: (4, [8]),
        277: (3, [1]),
        278: (4, [height]),
        279: (4, [width * height]),
    }
    return tiff({**usual, **dict(more)}, *bodies.values())


def jpeg_in_tiff(count, side=1024):
    data = many_scans(count, side, side, quality=50)
    grey = {259: (3, [7]), 262: (3, [6]), 277: (3, [3]), 258: (3, [8, 8, 8])}
    return tiff_of(side, side, {**grey, 279: (4, [len(data)])}.items(), data=data)


# WEBP


def riff(*chunks):
    body = b"WEBP" + b"".join(
        kind + struct.pack("<I", len(data)) + data + bytes(len(data) % 2) for kind, data in chunks
    )
    return b"RIFF" + struct.pack("<I", len(body)) + body


def canvas(width, height, *chunks):
    sides = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return riff((b"VP8X", b"\x02\0\0\0" + sides), *chunks)


# BMP


def bmp_of_runs(width, height, data):
    size = 54 + 1024 + len(data)
    header = b"BM" + struct.pack("<IHHI", size, 0, 0, 54 + 1024)
    header += struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(data), 0, 0, 256, 0)
    return header + bytes(1024) + data


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"

# By name: what makes it, the status of the answer, and a part of its sentence.
IMAGES = {
    "JPEG of 20,000 scans": (lambda: many_scans(20_000), 413, "scans"),
    "JPEG of 95 scans and 49 megapixels": (lambda: many_scans(85, 7000, 7000), 413, "scans"),
    "JPEG of 120 scans of single colours": (lambda: separate_scans(40), 413, "scans"),
    "JPEG of a grey scan 50,000 times": (
        lambda: many_scans(50_000, 512, 512, quality=20),
        413,
        "scans",
    ),
    "JPEG of 65,500 x 65,500": (lambda: sized(flat(64, 64), 65500, 65500), 413, "megapixels"),
    "JPEG of 4 million segments": (lambda: segments(1 << 22, b"\xff\xfe\0\2"), 400, "header"),
    "JPEG after 30 MB of filling": (lambda: segments(30 << 20, b"\xff"), 400, "header"),
    "JPEG after 30 MB of zeros": (lambda: segments(30 << 20, b"\0"), 400, "header"),
    "JPEG of two frames": (
        lambda: flat(64, 64)[:-2].replace(b"\xff\xda", b"\xff\xc0\0\2\xff\xda", 1),
        400,
        "",
    ),
    "EPS": (lambda: EPS, 400, "PostScript"),
    "GIF": (lambda: flat(64, 64, "GIF"), 400, "GIF"),
    "SVG": (lambda: b'<svg xmlns="http://www.w3.org/2000/svg"/>', 400, "SVG"),
    "PNG of 100,000 x 100,000": (
        lambda: png(100_000, 100_000, rows=b"\0"),
        413,
        "megapixels",
    ),
    "PNG of two headers": (
        lambda: png(8, 8, chunk(b"IHDR", struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0))),
        400,
        "two headers",
    ),
    "PNG with a text of 64 MB": (lambda: png(8, 8, chunk(b"zTXt", b"t\0\0" + BOMB)), 400, "large"),
    "PNG with 20,000 colour profiles": (lambda: png(8, 8, PROFILE * 20_000), 413, "texts"),
    "PNG of 2 million chunks": (lambda: png(8, 8, chunk(b"teSt", b"") * (2 << 20)), 413, "chunks"),
    "PNG of 1 x 900,000": (lambda: flat(1, 900_000, "PNG", "L"), 413, "narrow"),
    "PPM in text, 3,000 x 3,000": (
        lambda: b"P3 3000 3000 255\n" + b"1 " * (3 * 3000 * 3000 // 2),
        413,
        "slowly",
    ),
    "PGM of 30 megapixels with the maximum 254": (
        lambda: b"P5 6000 5000 254\n" + bytes(30_000_000),
        413,
        "slowly",
    ),
    "PPM of a million comments": (lambda: b"P3 8 8 255\n" + b"#\n" * (1 << 20), 413, "comments"),
    "PPM whose comment has 30 MB": (lambda: b"P6 #" + b"x" * (30 << 20), 400, "header"),
    "BMP of run lengths, 5,000 x 5,000": (
        lambda: bmp_of_runs(5000, 5000, b"\1\1" * (10 << 20)),
        413,
        "slowly",
    ),
    "BMP of 2 billion pixels": (
        lambda: flat(8, 8, "BMP")[:18] + struct.pack("<ii", 46000, 46000) + flat(8, 8, "BMP")[26:],
        413,
        "megapixels",
    ),
    "TIFF of 7 million strips": (
        lambda: tiff_of(64, 64, {273: (4, [8] * (7 << 20)), 278: (4, [1])}.items()),
        413,
        "values",
    ),
    "TIFF of 60,000 strips in the place of two": (
        lambda: tiff_of(
            6000, 6000, {273: (4, [8] * 60_000), 278: (4, [3000])}.items(), data=bytes(18_000_000)
        ),
        413,
        "strips",
    ),
    "TIFF of one tile of 40,000 x 40,000": (
        lambda: tiff_of(
            64,
            64,
            {
                259: (3, [8]),
                322: (4, [40_000]),
                323: (4, [40_000]),
                324: (4, [8]),
                325: (4, [9]),
            }.items(),
        ),
        413,
        "tiles",
    ),
    "TIFF with a JPEG of 5,000 scans": (lambda: jpeg_in_tiff(5000), 413, "scans"),
    "WEBP of 16,383 x 16,383": (
        lambda: canvas(16383, 16383, (b"ANIM", bytes(6))),
        413,
        "megapixels",
    ),
    "WEBP that ends in its header": (lambda: flat(64, 64, "WEBP")[:24], 400, ""),
}
