"""Every kind of image becomes 8-bit RGB; what is no image costs one question."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image

from mm_capacity.evaluation.images import (
    BadImageError,
    ImageStore,
    check_inside,
    decode,
    open_rgb,
    probe,
    to_rgb,
)
from tests.tsv import picture, to_base64

SIZE = (12, 8)


def stored(image: Image.Image, fmt: str = "PNG", **options) -> Image.Image:
    """What comes back from a file of this image."""
    buffer = io.BytesIO()
    image.save(buffer, format=fmt, **options)
    return open_rgb(buffer.getvalue())


def pixel(image: Image.Image) -> tuple[int, ...]:
    assert image.mode == "RGB"
    return image.getpixel((0, 0))


def test_rgb_is_unchanged():
    image = picture(1)
    assert stored(image).tobytes() == image.tobytes()


def test_rgb_holds_no_file():
    assert type(stored(picture(1))) is Image.Image


@pytest.mark.parametrize(("value", "expected"), [(0, 0), (128, 128), (255, 255)])
def test_grayscale(value, expected):
    assert pixel(stored(Image.new("L", SIZE, value))) == (expected,) * 3


def test_black_and_white():
    assert pixel(stored(Image.new("1", SIZE, 1))) == (255, 255, 255)


@pytest.mark.parametrize(
    ("value", "expected"), [(0, 0), (255, 1), (256, 1), (32768, 128), (65535, 255)]
)
@pytest.mark.parametrize("fmt", ["PNG", "TIFF"])
def test_16_bit_grey_is_scaled_not_clipped(value, expected, fmt):
    image = Image.fromarray(np.full((8, 12), value, np.uint16))
    assert pixel(stored(image, fmt)) == (expected,) * 3


def test_16_bit_ramp_stays_a_ramp():
    ramp = np.linspace(0, 65535, 96).astype(np.uint16).reshape(8, 12)
    grey = np.asarray(stored(Image.fromarray(ramp)))[..., 0].ravel().astype(int)
    assert grey[0] == 0 and grey[-1] == 255
    assert (np.diff(grey) > 0).all()


def test_32_bit_grey_uses_its_own_range():
    image = Image.fromarray(np.array([[0, 2**20]], np.int32))
    assert np.asarray(to_rgb(image))[0, :, 0].tolist() == [0, 255]


@pytest.mark.parametrize("top", [1.0, 255.0])
def test_float_images(top):
    image = Image.fromarray(np.array([[0, top / 2, top]], np.float32))
    assert np.asarray(to_rgb(image))[0, :, 0].tolist() == [0, 128, 255]


def test_palette():
    image = Image.new("RGB", SIZE, (10, 200, 30)).convert("P", palette=Image.Palette.ADAPTIVE)
    assert pixel(stored(image)) == (10, 200, 30)


def test_transparent_palette_lies_on_white():
    image = Image.new("P", SIZE, 0)
    image.putpalette([200, 0, 0, 0, 200, 0])
    image.putpixel((1, 0), 1)
    out = stored(image, transparency=0)
    assert pixel(out) == (255, 255, 255)
    assert out.getpixel((1, 0)) == (0, 200, 0)


@pytest.mark.parametrize(
    ("rgba", "expected"),
    [((9, 8, 7, 255), (9, 8, 7)), ((9, 8, 7, 0), (255, 255, 255)), ((0, 0, 0, 51), (204,) * 3)],
)
def test_rgba_lies_on_white(rgba, expected):
    assert pixel(stored(Image.new("RGBA", SIZE, rgba))) == expected


def test_grey_with_alpha_lies_on_white():
    assert pixel(stored(Image.new("LA", SIZE, (0, 0)))) == (255, 255, 255)


def test_cmyk():
    # No ink is white, full black ink is black.
    for ink, low, high in ((0, 250, 255), (255, 0, 5)):
        out = pixel(stored(Image.new("CMYK", SIZE, (0, 0, 0, ink)), "JPEG"))
        assert all(low <= channel <= high for channel in out)


def test_animation_gives_its_first_frame():
    frames = [Image.new("RGB", SIZE, colour) for colour in ((255, 0, 0), (0, 0, 255))]
    out = stored(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert pixel(out) == (255, 0, 0)


@pytest.mark.parametrize(
    "text",
    ["%%%", "abc", "aGVsbG8=", "", to_base64(picture(1))[:40]],
    ids=["no base64", "bad padding", "no image", "empty", "cut header"],
)
def test_what_is_no_image(text):
    with pytest.raises(BadImageError):
        probe(text)
    with pytest.raises(BadImageError):
        open_rgb(decode(text))


def test_damaged_pixels_show_when_decoded():
    text = to_base64(picture(1))
    cut = text[: len(text) // 2 // 4 * 4]
    probe(cut)
    with pytest.raises(BadImageError, match="no readable image"):
        open_rgb(decode(cut))


def test_absurd_size_is_refused(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(BadImageError):
        open_rgb(decode(to_base64(picture(1))))


def test_message_is_the_same_every_time():
    messages = set()
    for _ in range(2):
        with pytest.raises(BadImageError) as caught:
            open_rgb(base64.b64decode("aGVsbG8="))
        messages.add(str(caught.value))
    assert messages == {"no readable image (cannot identify image file)"}


def test_store_writes_each_content_once(tmp_path):
    store = ImageStore(tmp_path)
    first, again, other = (store.path(to_base64(picture(seed))) for seed in (1, 1, 2))
    assert first == again != other
    assert sorted(tmp_path.iterdir()) == sorted([first, other])
    assert open_rgb(first).tobytes() == picture(1).tobytes()


def test_store_leaves_nothing_of_a_bad_image(tmp_path):
    with pytest.raises(BadImageError):
        ImageStore(tmp_path).path("aGVsbG8=")
    assert not list(tmp_path.iterdir())


def test_paths_stay_inside(tmp_path):
    inside, outside = tmp_path / "in", tmp_path / "out"
    for folder in (inside, outside):
        folder.mkdir()
        picture(1).save(folder / "a.png")
    (inside / "link.png").symlink_to(outside / "a.png")
    assert check_inside(inside / "a.png", [inside]) == inside / "a.png"
    for path in (outside / "a.png", inside / ".." / "out" / "a.png", inside / "link.png"):
        with pytest.raises(BadImageError, match="out of the data folder"):
            check_inside(path, [inside])
