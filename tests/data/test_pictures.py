"""Pictures are read as a person sees them, and what cannot be used is one error that says why."""

import base64
import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from quatrain.data.messages import checked_messages, named_picture, pictures_of, with_picture_parts
from quatrain.data.pictures import BadPicture, PictureReader, column_of, decoded, has_pictures, opened
from quatrain.types.pictures import Picture

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (6, 9, 3), np.uint8)


def encoded(image, kind="PNG", **options):
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


PNG = encoded(Image.fromarray(PIXELS))
OTHER = encoded(Image.fromarray(255 - PIXELS))


def seen(content):
    return np.asarray(decoded(PictureReader().read(content)))


def header(width, height):
    """A PNG of this size that ends behind its header."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    begin = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return begin + struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))


def test_every_form_of_a_source_is_the_same_picture(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    reader = PictureReader(tmp_path)
    url = "data:image/png;base64," + base64.b64encode(PNG).decode()
    forms = [
        *(PNG, bytearray(PNG), url, "a.png", Path("a.png"), str(tmp_path / "a.png")),
        *({"bytes": PNG, "path": None}, {"bytes": None, "path": "a.png"}, {"url": url}),
    ]
    found = [reader.read(form) for form in forms]
    assert set(found) == {Picture.of(PNG, (9, 6))}
    assert {each.size for each in found} == {(9, 6)}
    assert all(each.encoded == PNG for each in found)
    assert found[3].source == tmp_path / "a.png"  # a file's bytes are not held
    assert reader.read(found[0]) is found[0]
    np.testing.assert_array_equal(np.asarray(decoded(found[3])), PIXELS)


def test_a_pil_picture_is_encoded_as_it_is_seen() -> None:
    one, again = (PictureReader().read(Image.fromarray(PIXELS)) for _ in range(2))
    assert one == again
    np.testing.assert_array_equal(np.asarray(decoded(one)), PIXELS)
    rotated = Image.open(io.BytesIO(encoded(Image.fromarray(PIXELS), exif=_exif(6))))
    assert PictureReader().read(rotated).size == (6, 9)
    cmyk = Image.fromarray(PIXELS).convert("CMYK")
    np.testing.assert_array_equal(seen(cmyk), np.asarray(cmyk.convert("RGB")))
    with pytest.raises(BadPicture, match="8 bits, or 16 bits of grey; its mode is 'F'"):
        PictureReader().read(Image.fromarray(PIXELS[..., 0].astype(np.float32)))


def _exif(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_picture_is_rotated_as_its_file_asks(kind) -> None:
    for orientation in range(1, 9):
        content = encoded(Image.fromarray(PIXELS), kind, exif=_exif(orientation))
        expected = ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB")
        picture = PictureReader(verify=False).read(content)  # from the header alone
        assert picture.size == expected.size
        np.testing.assert_array_equal(np.asarray(decoded(picture)), np.asarray(expected))
        np.testing.assert_array_equal(np.asarray(opened(content)), np.asarray(expected))


def test_transparent_places_are_white_and_deep_grey_is_scaled() -> None:
    clear = np.dstack([PIXELS, np.full(PIXELS.shape[:2], 255, np.uint8)])
    clear[0, 0] = (10, 20, 30, 0)
    for content in (encoded(Image.fromarray(clear)), encoded(Image.fromarray(clear), "WEBP", lossless=True)):
        np.testing.assert_array_equal(seen(content)[0, 0], 255)
        np.testing.assert_array_equal(seen(content)[1:], PIXELS[1:])
    palette = Image.fromarray(np.array([[0, 1]], np.uint8), "P")
    palette.putpalette([1, 2, 3, 4, 5, 6])
    assert seen(encoded(palette, transparency=0)).tolist() == [[[255] * 3, [4, 5, 6]]]
    assert seen(encoded(palette, "GIF")).tolist() == [[[1, 2, 3], [4, 5, 6]]]
    deep = np.array([[0, 257, 65535, 32768]], np.uint16)
    assert seen(encoded(Image.fromarray(deep)))[0, :, 0].tolist() == [0, 1, 255, 128]
    assert seen(encoded(Image.fromarray(PIXELS[..., 0])))[..., 2].tolist() == PIXELS[..., 0].tolist()


def test_pictures_of_reward_functions_are_decoded_when_they_are_used() -> None:
    picture = opened(PNG)
    assert picture.size == (9, 6)
    assert getattr(picture, "_im", None) is None  # nothing is decoded yet
    np.testing.assert_array_equal(np.asarray(picture), PIXELS)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (PNG[:-40], "a picture of bytes must be a whole picture:.*; replace it"),
        (b"", "none of PNG, JPEG, WebP, GIF and BMP"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "none of PNG, JPEG, WebP, GIF and BMP"),
        (header(60_000, 60_000), "it has more than 50000000 pixels"),
        (header(9_000, 9_000), "at most 50000000 pixels; a picture of bytes is 9000x9000"),
        (header(16_385, 100), "sides of at most 16384 pixels; a picture of bytes is 16385x100"),
        (header(3_000, 10), "none is 200 times as long as the other; a picture of bytes is 3000x10"),
        (bytes(2**25 + 1), "at most 32 MiB; a picture of bytes has 32 MiB"),
        ("text.png", "'text.png' must be a whole picture: it is none of PNG"),
        ("missing.png", "no file 'missing.png' of a picture .*; correct the path"),
        ("../outside.png", "must stay below the folder .*; set data.image_root"),
        ("/etc/hostname", "must stay below the folder"),
        ("link.png", "must stay below the folder"),
        ("a\0.png", "cannot be read"),
        ("http://example.com/a.png", "must not be a URL of the network .*download the data set"),
        ("HTTPS://example.com/a.png", "must not be a URL of the network"),
        ("file:///etc/hostname", "must begin with data:image/TYPE;base64"),
        ("data:text/html;base64,QQ==", "must begin with data:image/TYPE;base64"),
        ("data:image/png;base64,Q*==", "must be base64"),
        (7, "must be a path, a data URL, bytes, a PIL picture"),
        ({"bytes": None, "path": None}, "must be a path, a data URL, bytes, a PIL picture"),
    ],
)
def test_a_picture_that_cannot_be_used_is_one_error(source, message, tmp_path: Path) -> None:
    root = tmp_path / "data"
    root.mkdir()
    (root / "text.png").write_text("no picture")
    (tmp_path / "outside.png").write_bytes(PNG)
    (root / "link.png").symlink_to(tmp_path / "outside.png")
    with pytest.raises(BadPicture, match=message):
        PictureReader(root).read(source)


def test_a_path_needs_a_folder_and_a_file_must_stay_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(BadPicture, match=r"set data\.image_root, or give bytes"):
        PictureReader().read("a.png")
    path = tmp_path / "a.png"
    path.write_bytes(PNG)
    picture = PictureReader(tmp_path).read("a.png")
    path.write_bytes(OTHER)
    with pytest.raises(BadPicture, match="must not change during a run"):
        decoded(picture)


def test_without_verification_only_the_header_is_read() -> None:
    picture = PictureReader(verify=False).read(PNG[:-40])
    assert picture.size == (9, 6)
    with pytest.raises(BadPicture, match=f"{picture.name} must be a whole picture"):
        decoded(picture)


IMAGE = {"type": "image"}
ONE, TWO = PictureReader().read(PNG), PictureReader().read(OTHER)
SEEN = [{"type": "image", "image": each} for each in (ONE, TWO)]


def text(value):
    return {"type": "text", "text": value}


def user(content):
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    ("messages", "given", "expected"),
    [
        ([user([IMAGE, text("a"), IMAGE])], [PNG, OTHER], [[SEEN[0], text("a"), SEEN[1]]]),
        ([user([{**IMAGE, "image": OTHER}, IMAGE])], [PNG], [[SEEN[1], SEEN[0]]]),
        ([user([{"type": "image_url", "image_url": {"url": PNG}}])], None, [[SEEN[0]]]),
        ([user([{**IMAGE, "path": None, "bytes": PNG}])], None, [[SEEN[0]]]),
        ([user("<image>a"), user("b<image>")], [PNG, OTHER], [[SEEN[0], text("a")], [text("b"), SEEN[1]]]),
        ([user([text("a<image>")])], [PNG], [[text("a"), SEEN[0]]]),
        (
            [{"role": "system", "content": "s"}, user("a"), user("b")],
            [PNG, OTHER],
            ["s", [SEEN[0], SEEN[1], text("a")], "b"],
        ),
        ([user("a<image>")], None, ["a<image>"]),
        ([user("a")], [], ["a"]),
    ],
)
def test_pictures_stand_where_each_form_of_data_has_them(messages, given, expected) -> None:
    placed = PictureReader().placed(messages, given)
    assert [message["content"] for message in placed] == expected


@pytest.mark.parametrize(
    ("messages", "given", "message"),
    [
        ([user([IMAGE, IMAGE])], [PNG], "it has 2 parts of the type `image` .* and 1 pictures"),
        ([user([IMAGE])], [PNG, OTHER], "it has 1 parts of the type `image` .* and 2 pictures"),
        ([user([{**IMAGE, "image": PNG}])], [OTHER], "it has 0 parts of the type `image` .* and 1 pictures"),
        ([user("<image><image>")], [PNG], "it has 2 times <image> and 1 pictures"),
        ([user("<image>")], [], "it has 1 times <image> and 0 pictures"),
        ([user([IMAGE])], None, "must have a picture .*or the row a column `images`"),
        ([{"role": "system", "content": "a"}], [PNG], "the first message of the role `user`; there is none"),
        ([user([{**IMAGE, "image": ONE}] * 65)], None, "at most 64 pictures; it has 65"),
    ],
)
def test_a_row_has_as_many_places_as_pictures(messages, given, message) -> None:
    with pytest.raises(BadPicture, match=message):
        PictureReader().placed(messages, given)


def test_the_sources_of_a_row_are_read_wherever_they_are() -> None:
    row = {
        "prompt": [user([{**IMAGE, "image": PNG}, text("a")])],
        "image": OTHER,
        "images": [PNG, {"bytes": OTHER}],
        "other": [1, {"content": "x"}],
        "text": "a",
    }
    row["messages"] = [*row["prompt"], {"role": "assistant", "content": "b"}]
    read = PictureReader().of_row(row)
    assert read["messages"][0]["content"][0] is read["prompt"][0]["content"][0]  # it is decoded once
    assert list(read) == list(row)
    assert read["prompt"] == [user([SEEN[0], text("a")])]
    assert (read["image"], read["images"]) == (TWO, [ONE, TWO])
    assert (read["other"], read["text"]) == (row["other"], "a")
    with pytest.raises(BadPicture, match="`images` and `image` have some; remove one"):
        column_of(read)
    assert column_of({"images": None, "image": OTHER}) == [OTHER]
    assert column_of({"images": []}) == []
    assert column_of({"text": "a"}) is None
    assert [has_pictures({name: row[name]}) for name in row] == [True, True, True, False, False, True]
    assert not has_pictures({"images": [], "image": None})


def test_checked_messages_keep_pictures_and_join_texts() -> None:
    [message] = checked_messages([user([text("a"), text("b"), SEEN[0], text(""), text("c")])])
    assert message["content"] == [text("ab"), SEEN[0], text("c")]
    assert pictures_of([message, user("x")]) == [ONE]
    named = with_picture_parts([message], named_picture)[0]["content"][1]
    assert named == {"type": "image", "picture": ONE.name, "size": [9, 6]}
    with pytest.raises(ValueError, match=r"and pictures where the model sees them \(model.vision\)"):
        checked_messages([user([IMAGE, text("a")])])
    with pytest.raises(ValueError, match="half a surrogate pair"):
        checked_messages([user([SEEN[0], text("\ud800")])])
