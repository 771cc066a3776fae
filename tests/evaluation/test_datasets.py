"""Data sets by name, through real VLMEvalKit, from small tables in the official formats."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import ssl

import numpy as np
import pytest
from PIL import Image

from mm_capacity.errors import UserError
from mm_capacity.evaluation.datasets import (
    BadQuestion,
    known_datasets,
    lmu_root,
    open_dataset,
)
from mm_capacity.evaluation.tsv import read_tsv
from mm_capacity.evaluation.units import select_first, unit_keys
from mm_capacity.evaluation.vlmeval_process import import_vlmeval
from tests.tsv import (
    COPY_OFFSET,
    mmbench_rows,
    mme_rows,
    picture,
    to_base64,
    write_mmbench,
    write_mme,
    write_tsv,
)

NAME = "MMBench_DEV_EN"


@pytest.fixture(autouse=True)
def no_download(monkeypatch):
    """Any download fails at once, as without a network; asked URLs are kept."""
    import_vlmeval()
    asked: list[str] = []

    def fail(url, *args, **kwargs):
        asked.append(url)
        raise OSError("Name or service not known")

    monkeypatch.setattr("urllib.request.urlretrieve", fail)
    return asked


def one_line(caught) -> str:
    message = str(caught.value)
    assert message and "\n" not in message
    return message


def texts(data, index) -> str:
    return "".join(p["text"] for p in data.messages(index)[0]["content"] if p["type"] == "text")


def image(data, index) -> Image.Image:
    return next(p["image"] for p in data.messages(index)[0]["content"] if p["type"] == "image")


# --- tables that are there -------------------------------------------------------------------


def test_unofficial_table_is_used_with_a_warning_and_left_alone(tmp_path, no_download):
    path = write_mmbench(tmp_path)
    content, modified = path.read_bytes(), path.stat().st_mtime_ns
    data = open_dataset(NAME, lmu_data=tmp_path)
    assert no_download == []
    assert (path.read_bytes(), path.stat().st_mtime_ns) == (content, modified)
    assert data.official is False
    assert data.digest == hashlib.sha256(content).hexdigest()
    (warning,) = data.warnings
    assert "not the official file" in warning and data.digest in warning
    for index in data.frame["index"]:
        data.messages(index)
    assert [p.name for p in tmp_path.iterdir()] == [path.name], "nothing is written to LMUData"


def test_official_table_gives_no_warning(tmp_path, monkeypatch):
    from vlmeval.dataset import ImageMCQDataset

    path = write_mmbench(tmp_path)
    md5 = hashlib.md5(path.read_bytes()).hexdigest()
    monkeypatch.setitem(ImageMCQDataset.DATASET_MD5, NAME, md5)
    data = open_dataset(NAME, lmu_data=tmp_path)
    assert data.official is True and data.warnings == []


def test_lmudata_variable_is_read(tmp_path, monkeypatch):
    write_mme(tmp_path)
    monkeypatch.setenv("LMUData", str(tmp_path))
    assert lmu_root() == tmp_path
    assert len(open_dataset("MME")) == 12
    assert os.environ["LMUData"] == str(tmp_path)


def test_default_folder_is_in_the_home(monkeypatch, tmp_path):
    monkeypatch.delenv("LMUData", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert lmu_root() == tmp_path / "LMUData"


def test_circular_copies_share_the_image_of_their_base(tmp_path):
    write_mmbench(tmp_path)
    data = open_dataset(NAME, lmu_data=tmp_path)
    assert (data.kind, data.style, len(data)) == ("MCQ", "circular", 24)
    for turn in range(4):
        assert image(data, 243 + turn * COPY_OFFSET).tobytes() == picture(2).tobytes()


def test_prompts_equal_those_of_plain_vlmevalkit(tmp_path, monkeypatch):
    """Our subclass against VLMEvalKit's own object, built by VLMEvalKit from the same file."""
    from vlmeval.dataset import ImageMCQDataset, ImageYORNDataset, build_dataset

    for name, write, cls in (
        (NAME, write_mmbench, ImageMCQDataset),
        ("MME", write_mme, ImageYORNDataset),
    ):
        path = write(tmp_path)
        md5 = hashlib.md5(path.read_bytes()).hexdigest()
        monkeypatch.setitem(cls.DATASET_MD5, name, md5)
        data = open_dataset(name, lmu_data=tmp_path)
        monkeypatch.setenv("LMUData", str(tmp_path))
        plain = build_dataset(name)
        assert type(plain) is cls
        assert plain.data["index"].tolist() == data.frame["index"].tolist()
        for position, index in enumerate(data.frame["index"]):
            parts = plain.build_prompt(position)
            ours = data.messages(index)[0]["content"]
            assert [p["type"] for p in parts] == [p["type"] for p in ours]
            assert parts[-1]["value"] == ours[-1]["text"]
            with Image.open(parts[0]["value"]) as expected:
                assert expected.convert("RGB").tobytes() == ours[0]["image"].tobytes()


def test_words_stay_text_and_empty_cells_stay_absent(tmp_path):
    words = {0: ["None", "NA", "null", "nan"], 1: ["007", "1.50", "True", "1e5"], 2: ["a", "N/A"]}
    write_mmbench(tmp_path, n=3, options=words, circular=False)
    data = open_dataset(NAME, lmu_data=tmp_path)
    assert "Options:\nA. None\nB. NA\nC. null\nD. nan\nPlease" in texts(data, 241)
    assert "Options:\nA. 007\nB. 1.50\nC. True\nD. 1e5\nPlease" in texts(data, 242)
    assert "Options:\nA. a\nB. N/A\nPlease" in texts(data, 243)
    assert data.frame["D"].isna().tolist() == [False, False, True]
    assert texts(data, 241).startswith("Hint: A hint.\n")
    assert texts(data, 242).startswith("Question: ")


def test_text_indices_are_kept(tmp_path):
    rows = [{**row, "index": f"q_{row['index']}"} for row in mmbench_rows(3, circular=False)]
    write_tsv(tmp_path / "SEEDBench_IMG.tsv", rows)
    data = open_dataset("SEEDBench_IMG", lmu_data=tmp_path)
    assert data.frame["index"].tolist() == ["q_241", "q_242", "q_243"]
    assert "picture 1" in texts(data, "q_242")


def test_any_class_of_vlmevalkit_is_found(tmp_path):
    """MMMU's class splits the prompt around several images, given as a list in one cell."""
    from vlmeval.dataset import MMMUDataset

    (row,) = mmbench_rows(1, circular=False)
    row["image"] = str([to_base64(picture(1)), to_base64(picture(2))])
    row["question"] = "First <image 1> then <image 2> what?"
    write_tsv(tmp_path / "MMMU_DEV_VAL.tsv", [row])
    data = open_dataset("MMMU_DEV_VAL", lmu_data=tmp_path)
    assert isinstance(data.dataset, MMMUDataset)
    kinds = [part["type"] for part in data.messages(241)[0]["content"]]
    assert kinds == ["text", "image", "text", "image", "text"]
    pictures = [p["image"] for p in data.messages(241)[0]["content"] if p["type"] == "image"]
    assert [p.tobytes() for p in pictures] == [picture(1).tobytes(), picture(2).tobytes()]


def test_vqa_data(tmp_path):
    rows = [{"index": 0, "image": to_base64(picture(0)), "question": "q?", "answer": "['NA']"}]
    write_tsv(tmp_path / "TextVQA_VAL.tsv", rows)
    data = open_dataset("TextVQA_VAL", lmu_data=tmp_path)
    assert data.kind == "VQA"
    assert texts(data, 0) == "q?\nAnswer the question using a single word or phrase."


def test_custom_table(tmp_path):
    write_mmbench(tmp_path, "MyQuestions", n=3, circular=False)
    data = open_dataset("MyQuestions", lmu_data=tmp_path)
    assert type(data.dataset).__name__ == "CustomMCQDataset"
    assert data.official is None and data.warnings == [] and len(data.digest) == 64
    assert "Options:\nA. lamp 0" in texts(data, 241)


def test_process_is_left_alone(tmp_path):
    before = dict(os.environ)
    data = open_dataset("MME", lmu_data=write_mme(tmp_path).parent)
    data.messages(0)
    assert dict(os.environ) == before
    assert ssl._create_default_https_context is ssl.create_default_context


def test_unknown_question(tmp_path):
    data = open_dataset("MME", lmu_data=write_mme(tmp_path).parent)
    with pytest.raises(KeyError, match="no question 99"):
        data.messages(99)


def test_image_size(tmp_path):
    data = open_dataset("MME", lmu_data=write_mme(tmp_path).parent)
    assert data.image_size(0) == (40, 30)


# --- downloads -------------------------------------------------------------------------------


def test_without_network_and_table(tmp_path, no_download):
    with pytest.raises(UserError) as caught:
        open_dataset(NAME, lmu_data=tmp_path)
    message = one_line(caught)
    assert str(tmp_path / f"{NAME}.tsv") in message, "what is missing"
    assert f"put {NAME}.tsv into {tmp_path}" in message, "where to put it"
    assert "DIGITS_MCQ, DIGITS_YN" in message, "what needs no download"
    assert "Name or service not known" in message
    assert len(no_download) == 1 and no_download[0].endswith(f"{NAME}.tsv")
    assert list(tmp_path.iterdir()) == []


def test_failed_download_says_nothing_else(tmp_path, capfd):
    with pytest.raises(UserError):
        open_dataset("MME", lmu_data=tmp_path)
    assert capfd.readouterr() == ("", "")


def test_downloaded_by_vlmevalkit(tmp_path, monkeypatch):
    path = write_mme(tmp_path / "server")

    def retrieve(url, filename, reporthook=None):
        assert url.endswith("/MME.tsv")
        # Whoever downloads now does so with verified certificates.
        assert ssl._create_default_https_context is ssl.create_default_context
        with open(filename, "wb") as file:
            file.write(path.read_bytes())

    monkeypatch.setattr("urllib.request.urlretrieve", retrieve)
    data = open_dataset("MME", lmu_data=tmp_path / "new" / "lmu")
    assert len(data) == 12 and data.official is False
    assert (tmp_path / "new" / "lmu" / "MME.tsv").read_bytes() == path.read_bytes()


def test_interrupted_download_leaves_no_table(tmp_path, monkeypatch):
    def half(url, filename, reporthook=None):
        with open(filename, "wb") as file:
            file.write(b"index\tquest")
        raise OSError("connection reset")

    monkeypatch.setattr("urllib.request.urlretrieve", half)
    with pytest.raises(UserError, match="connection reset"):
        open_dataset("MME", lmu_data=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError) as caught:
        open_dataset("MME", lmu_data=tmp_path / "file" / "lmu")
    assert "set LMUData" in one_line(caught)


# --- names -----------------------------------------------------------------------------------


def test_unknown_name_with_close_match(tmp_path):
    with pytest.raises(UserError) as caught:
        open_dataset("MMBench_DEV_ENG", lmu_data=tmp_path)
    assert "did you mean 'MMBench_DEV_EN'" in one_line(caught)
    with pytest.raises(UserError, match="DIGITS_MCQ"):
        open_dataset("DIGIT_MCQ", lmu_data=tmp_path)


@pytest.mark.parametrize("name", ["../MME", "/etc/passwd", "a/b", ""])
def test_names_are_no_paths(name, tmp_path):
    with pytest.raises(UserError, match="unknown data set"):
        open_dataset(name, lmu_data=tmp_path / "x" / "y")


def test_other_modalities(tmp_path):
    with pytest.raises(UserError, match="video data set"):
        open_dataset("Video-MME", lmu_data=tmp_path)
    with pytest.raises(UserError, match="name its parts .*MMMB_en"):
        open_dataset("MMMB", lmu_data=tmp_path)


def test_known_names_exist():
    from vlmeval.dataset import SUPPORTED_DATASETS

    assert set(known_datasets()) - {"DIGITS_MCQ", "DIGITS_YN"} <= set(SUPPORTED_DATASETS)


# --- tables that cannot be used --------------------------------------------------------------


@pytest.mark.parametrize("column", ["index", "question", "A", "B", "answer", "image"])
def test_missing_column_mcq(column, tmp_path):
    rows = [{k: v for k, v in row.items() if k != column} for row in mmbench_rows(2)]
    path = write_tsv(tmp_path / f"{NAME}.tsv", rows)
    with pytest.raises(UserError) as caught:
        open_dataset(NAME, lmu_data=tmp_path)
    message = one_line(caught)
    assert f"{path} has no column '{column}'" in message and "split" in message


@pytest.mark.parametrize("column", ["answer", "category", "image_path"])
def test_missing_column_mme(column, tmp_path):
    rows = [{k: v for k, v in row.items() if k != column} for row in mme_rows()]
    write_tsv(tmp_path / "MME.tsv", rows)
    with pytest.raises(UserError, match=f"no column '{column}'"):
        open_dataset("MME", lmu_data=tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"index\tquestion\timage\tA\tB\tanswer\n", "has no questions"),
        (b"index\tquestion\n\xff\xfe\t1\n", "not UTF-8"),
        (b'index\tquestion\n1\t"never closed\n', "not a tab-separated table"),
    ],
)
def test_useless_files(content, words, tmp_path):
    (tmp_path / f"{NAME}.tsv").write_bytes(content)
    with pytest.raises(UserError) as caught:
        open_dataset(NAME, lmu_data=tmp_path)
    message = one_line(caught)
    assert words in message and f"{NAME}.tsv" in message


def test_table_is_a_folder(tmp_path):
    (tmp_path / f"{NAME}.tsv").mkdir()
    with pytest.raises(UserError, match="cannot be read"):
        open_dataset(NAME, lmu_data=tmp_path)


def test_duplicate_index(tmp_path):
    rows = mmbench_rows(3, circular=False)
    rows[2]["index"] = 241
    write_tsv(tmp_path / f"{NAME}.tsv", rows)
    with pytest.raises(UserError, match="the index '241' occurs more than once"):
        open_dataset(NAME, lmu_data=tmp_path)


def test_empty_index(tmp_path):
    rows = mmbench_rows(3, circular=False)
    rows[1]["index"] = ""
    write_tsv(tmp_path / f"{NAME}.tsv", rows)
    with pytest.raises(UserError, match="empty in line 3"):
        open_dataset(NAME, lmu_data=tmp_path)


def test_text_index_in_circular_data(tmp_path):
    rows = mmbench_rows(2, circular=False)
    rows[0]["index"] = "first"
    write_tsv(tmp_path / f"{NAME}.tsv", rows)
    with pytest.raises(UserError, match="whole numbers"):
        open_dataset(NAME, lmu_data=tmp_path)


def test_no_image_at_all(tmp_path):
    rows = [{**row, "image": ""} for row in mmbench_rows(2, circular=False)]
    write_tsv(tmp_path / f"{NAME}.tsv", rows)
    with pytest.raises(UserError, match="image column is empty"):
        open_dataset(NAME, lmu_data=tmp_path)


@pytest.mark.parametrize("limit", [0, -1])
def test_limit_below_one(limit):
    with pytest.raises(UserError, match="limit"):
        open_dataset("DIGITS_MCQ", limit=limit)


# --- bad images ------------------------------------------------------------------------------


def test_a_corrupt_image_costs_its_questions_only(tmp_path):
    rows = mmbench_rows(4)
    rows[1]["image"] = "%%%%" * 30
    rows[2]["image"] = rows[2]["image"][:400]
    write_tsv(tmp_path / f"{NAME}.tsv", rows)
    data = open_dataset(NAME, lmu_data=tmp_path)
    assert len(data) == 16
    assert set(data.bad) == {242 + k * COPY_OFFSET for k in range(4)}
    for index in data.bad:
        with pytest.raises(BadQuestion) as caught:
            data.messages(index)
        assert caught.value.index == index and caught.value.reason == data.bad[index]
    # A cut body shows only when its pixels are decoded.
    with pytest.raises(BadQuestion, match="truncated"):
        data.messages(243)
    assert "truncated" in data.bad[243]
    assert texts(data, 241) and texts(data, 244 + COPY_OFFSET)
    json.dumps({str(k): v for k, v in data.bad.items()})


def test_reference_to_nowhere(tmp_path):
    rows = mmbench_rows(2)
    rows[-1]["image"] = "999"
    write_tsv(tmp_path / f"{NAME}.tsv", rows)
    data = open_dataset(NAME, lmu_data=tmp_path)
    assert list(data.bad) == [rows[-1]["index"]] and "'999'" in data.bad[rows[-1]["index"]]


def test_questions_without_image_are_left_out_as_vlmevalkit_does(tmp_path):
    rows = mmbench_rows(3, circular=False)
    rows[1]["image"] = ""
    write_tsv(tmp_path / "ScienceQA_VAL.tsv", rows)
    data = open_dataset("ScienceQA_VAL", lmu_data=tmp_path)
    assert data.frame["index"].tolist() == [241, 243]
    assert any("1 questions without an image" in w for w in data.warnings)


def test_image_modes_run(tmp_path):
    deep = Image.fromarray(np.full((8, 12), 32768, np.uint16))
    modes = {
        "CMYK": (Image.new("CMYK", (12, 8), (0, 0, 0, 255)), "JPEG"),
        "L": (Image.new("L", (12, 8), 77), "PNG"),
        "16 bit": (deep, "PNG"),
        "palette": (picture(1).convert("P"), "PNG"),
        "RGBA": (Image.new("RGBA", (12, 8), (0, 0, 0, 0)), "PNG"),
    }
    rows = mmbench_rows(len(modes), circular=False)
    for row, (shown, fmt) in zip(rows, modes.values(), strict=True):
        row["image"] = to_base64(shown, fmt)
    write_tsv(tmp_path / "MMStar.tsv", rows)
    data = open_dataset("MMStar", lmu_data=tmp_path)
    seen = dict(zip(modes, (image(data, i) for i in data.frame["index"]), strict=True))
    assert data.bad == {} and {i.mode for i in seen.values()} == {"RGB"}
    assert max(seen["CMYK"].getpixel((0, 0))) <= 5
    assert seen["L"].getpixel((0, 0)) == (77,) * 3
    assert seen["16 bit"].getpixel((0, 0)) == (128,) * 3
    assert seen["RGBA"].getpixel((0, 0)) == (255,) * 3


def test_image_of_another_table_of_the_same_name_is_not_taken(tmp_path):
    write_mmbench(tmp_path, n=1, circular=False)
    first = image(open_dataset(NAME, lmu_data=tmp_path), 241).tobytes()
    (row,) = mmbench_rows(1, circular=False)
    write_tsv(tmp_path / f"{NAME}.tsv", [{**row, "image": to_base64(picture(99))}])
    second = image(open_dataset(NAME, lmu_data=tmp_path), 241).tobytes()
    assert first == picture(0).tobytes() and second == picture(99).tobytes()


# --- hostile tables --------------------------------------------------------------------------


def test_cells_are_not_executed(tmp_path):
    """VLMEvalKit evaluates the index and list-like image cells as Python."""
    witness = tmp_path / "witness"
    code = f"__import__('pathlib').Path({str(witness)!r}).touch()"
    rows = mmbench_rows(3, circular=False)
    write_tsv(tmp_path / "One.tsv", [{**rows[0], "index": code}, *rows[1:]])
    with pytest.raises(UserError, match="cannot be an index"):
        open_dataset("One", lmu_data=tmp_path)
    write_tsv(tmp_path / "Two.tsv", [{**rows[0], "image": f"[{code}]"}, *rows[1:]])
    data = open_dataset("Two", lmu_data=tmp_path)
    assert set(data.bad) == {241}
    paths = [{**row, "image_path": "a.png"} for row in rows]
    paths[0]["image_path"] = f"[{code}]"
    for row in paths:
        del row["image"]
    write_tsv(tmp_path / "Three.tsv", paths)
    with pytest.raises(BadQuestion):
        open_dataset("Three", lmu_data=tmp_path).messages(241)
    assert not witness.exists()


def test_paths_are_not_followed_out_of_the_data_folder(tmp_path):
    root = tmp_path / "lmu"
    inside = root / "images" / "Paths"
    inside.mkdir(parents=True)
    picture(1).save(inside / "good.png")
    picture(2).save(tmp_path / "secret.png")
    (inside / "link.png").symlink_to(tmp_path / "secret.png")
    cells = [
        "good.png",
        str(inside / "good.png"),
        str(["good.png", "good.png"]),
        "../../../secret.png",
        str(tmp_path / "secret.png"),
        "link.png",
        str(["good.png", "../../../secret.png"]),
        "absent.png",
        "",
    ]
    rows = [
        {"index": i, "image_path": cell, "question": "q", "A": "x", "B": "y", "answer": "A"}
        for i, cell in enumerate(cells)
    ]
    write_tsv(root / "Paths.tsv", rows)
    data = open_dataset("Paths", lmu_data=root)
    assert set(data.bad) == set(range(3, 9))
    for index in range(3):
        assert image(data, index).tobytes() == picture(1).tobytes()
    for index in range(3, 7):
        with pytest.raises(BadQuestion, match="out of the data folder"):
            data.messages(index)
    with pytest.raises(BadQuestion, match="no such image file"):
        data.messages(7)


def test_image_path_beside_an_image_is_no_path(tmp_path):
    """MME names its pairs by image_path; VLMEvalKit would write, or read, a file there."""
    rows = mme_rows(2, categories=("OCR",))
    secret = tmp_path / "secret.png"
    picture(7).save(secret)
    for row, path in zip(rows, [str(secret)] * 2 + ["../../../evil.png"] * 2, strict=True):
        row["image_path"] = path
    write_tsv(tmp_path / "lmu" / "MME.tsv", rows)
    data = open_dataset("MME", lmu_data=tmp_path / "lmu")
    assert data.bad == {}
    assert image(data, 0).tobytes() == picture(1000).tobytes()
    for index in range(4):
        data.messages(index)
    assert sorted(p.name for p in tmp_path.rglob("*.png")) == ["secret.png"]


def test_path_in_the_image_column_is_not_opened(tmp_path):
    secret = tmp_path / "secret.png"
    picture(7).save(secret)
    rows = mmbench_rows(3, circular=False)
    rows[0]["image"] = str(secret)
    rows[1]["image"] = "/" * 80 + str(secret)
    write_tsv(tmp_path / "MMStar.tsv", rows)
    data = open_dataset("MMStar", lmu_data=tmp_path)
    assert set(data.bad) == {241, 242}


# --- limit -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "expected"), [(1, 2), (2, 2), (5, 4), (6, 6), (7, 6), (99, 12)])
def test_limit_keeps_mme_pairs(limit, expected, tmp_path):
    write_mme(tmp_path)
    data = open_dataset("MME", limit=limit, lmu_data=tmp_path)
    assert len(data) == expected == len(data.dataset.data)
    assert data.frame.groupby(["category", "image_path"]).size().eq(2).all()
    assert data.frame["category"].nunique() == min(3, expected // 2)


def test_limit_keeps_circular_copies(tmp_path):
    write_mmbench(tmp_path)
    data = open_dataset(NAME, limit=9, lmu_data=tmp_path)
    assert sorted(i % COPY_OFFSET for i in data.frame["index"]) == [241] * 4 + [242] * 4
    assert data.frame["category"].nunique() == 2
    assert image(data, 242 + 3 * COPY_OFFSET).tobytes() == picture(1).tobytes()


def test_limit_is_deterministic_and_in_file_order(tmp_path):
    write_mmbench(tmp_path, n=9, circular=False)
    runs = [open_dataset(NAME, limit=5, lmu_data=tmp_path).frame["index"].tolist() for _ in "ab"]
    assert runs[0] == runs[1] == [241, 242, 243, 244, 245]


def test_limit_goes_round_the_categories():
    import pandas as pd

    frame = pd.DataFrame({"index": range(8), "category": list("aaaaabbc")})
    assert select_first(frame, "single", 4) == [0, 1, 5, 7]
    assert select_first(frame, "single", 6) == [0, 1, 2, 5, 6, 7]
    assert select_first(frame.drop(columns="category"), "single", 3) == [0, 1, 2]


def test_a_single_unit_may_exceed_the_limit():
    import pandas as pd

    frame = pd.DataFrame({"index": [1, 2, 1_000_001, 2_000_001], "category": ["a"] * 4})
    assert select_first(frame, "circular", 1) == [0, 2, 3]


def test_g_index_names_the_base_question():
    import pandas as pd

    frame = pd.DataFrame({"index": [5, 17, 18], "g_index": [5, 5, 18]})
    assert unit_keys(frame, "circular") == [5, 5, 18]


# --- reading ---------------------------------------------------------------------------------


def test_read_tsv_keeps_words(tmp_path):
    rows = [{"A": "NA", "answer": "01", "n": "3"}, {"A": "", "answer": "nan", "n": "4"}]
    frame = read_tsv(write_tsv(tmp_path / "t.tsv", rows))
    assert frame["A"].isna().tolist() == [False, True] and frame["A"][0] == "NA"
    assert frame["answer"].tolist() == ["01", "nan"]
    assert frame["n"].tolist() == [3, 4]


def test_cells_with_tabs_quotes_and_newlines(tmp_path):
    (row,) = mmbench_rows(1, circular=False)
    row["A"] = 'a "quoted"\tcell\nof two lines'
    write_tsv(tmp_path / "MMStar.tsv", [row])
    assert 'A. a "quoted"\tcell\nof two lines\n' in texts(
        open_dataset("MMStar", lmu_data=tmp_path), 241
    )


def test_base64_with_line_breaks(tmp_path):
    buffer = io.BytesIO()
    picture(3).save(buffer, format="PNG")
    (row,) = mmbench_rows(1, circular=False)
    row["image"] = base64.encodebytes(buffer.getvalue()).decode()
    write_tsv(tmp_path / "MMStar.tsv", [row])
    data = open_dataset("MMStar", lmu_data=tmp_path)
    assert image(data, 241).tobytes() == picture(3).tobytes()
