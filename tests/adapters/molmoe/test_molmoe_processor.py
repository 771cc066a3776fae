"""The MolmoE processor against what the original made of the same pictures and texts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from molmoe_golden import DATA, make_folder, processor_cases, processor_tensors
from PIL import Image

from vlm_adapters.molmoe.image_processing import tiling_spec
from vlm_adapters.molmoe.processing import MolmoProcessor, collate
from vlm_adapters.molmoe.tiling import CLIP_STD, TilingSpec, choose_grid

PICTURES = ("square", "wide3to1", "tall1to3", "tiny20", "rgba", "gray")
# One grey level of 255 after the division by the standard deviation.
ONE_LEVEL = 1 / 255 / torch.tensor(CLIP_STD)


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    return MolmoProcessor.from_pretrained(make_folder(tmp_path_factory.mktemp("molmoe")))


def stored(name: str) -> Image.Image:
    return Image.open(DATA / "processor" / f"{name}.png")


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_as_the_original(processor, name):
    case, golden = processor_cases()[name], processor_tensors()
    made = processor.process(images=[stored(name)], text=case["text"], **case["kwargs"])
    for key in ("input_ids", "image_input_idx", "image_masks"):
        assert torch.equal(made[key].to(golden[f"{name}.{key}"].dtype), golden[f"{name}.{key}"])
    assert {key: str(value.dtype) for key, value in made.items()} == case["dtypes"]
    assert list(made["images"].shape) == case["images_shape"]
    # The stored slice takes every 29th value of a patch; the channel is the value's rest by 3.
    pixels, wanted = made["images"][:, ::37, ::29], golden[f"{name}.images_slice_p37_d29"]
    level = ONE_LEVEL[torch.arange(0, 588, 29) % 3]
    assert ((pixels - wanted).abs() <= level).all()
    # Every patch takes part in these.
    means = made["images"].mean(dim=-1) - golden[f"{name}.images_patch_mean"]
    spread = made["images"].std(dim=-1) - golden[f"{name}.images_patch_std"]
    assert means.abs().max() < 1e-4
    assert spread.abs().max() < 5e-3  # n - 1 or n in the denominator
    assert abs(float(made["images"].double().sum()) - case["images_sum"]) < 1.0


def test_thirteen_crops(processor):
    """The layout depends on the size alone, so a blank picture of that size tells it."""
    case, golden = processor_cases()["large_maxcrops"], processor_tensors()
    blank = Image.new("RGB", (case["width"], case["height"]))
    made = processor.process(images=blank, text=case["text"])
    for key in ("input_ids", "image_input_idx", "image_masks"):
        wanted = golden[f"large_maxcrops.{key}"]
        assert torch.equal(made[key].to(wanted.dtype), wanted)


def test_texts_as_the_original(processor):
    for case in processor_cases()["_text_cases"]:
        options = {key: case[key] for key in ("message_format", "always_start_with_space")}
        assert processor.process(case["text"], **options)["input_ids"].tolist() == case["input_ids"]
        grouped = processor.process(case["text"], text_kwargs=options)
        assert grouped["input_ids"].tolist() == case["input_ids"]
    made = processor.process(processor_cases()["text_only"]["text"])
    assert list(made) == ["input_ids"]
    assert torch.equal(made["input_ids"], processor_tensors()["text_only.input_ids"])


def test_two_images_are_refused(processor):
    """The original gives both the same positions, which the recorded indices show."""
    index = processor_tensors()["two_images.image_input_idx"]
    placed = index[index >= 0]
    assert placed.numel() - placed.unique().numel() == 288
    with pytest.raises(ValueError, match="2 images in one prompt: MolmoE takes one image"):
        processor.process("Which?", [stored("tiny20"), stored("gray")])
    with pytest.raises(ValueError, match="2 images in one prompt"):
        processor(text="Which?", images=[stored("tiny20"), stored("gray")])


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((20, 20), (1, 1)),
        ((112, 112), (1, 1)),
        ((112, 337), (1, 2)),  # a side of exactly the margins divides by zero
        ((337, 112), (2, 1)),
        ((400, 400), (2, 2)),
        ((930, 1210), (3, 4)),
        ((336, 336), (1, 1)),
        ((336, 3000), (1, 12)),
        ((5000, 5000), (3, 3)),
    ],
)
def test_grids(size, grid):
    assert choose_grid(*size, TilingSpec()) == grid


@pytest.mark.parametrize("max_crops", [1, 4, 36])
def test_most_crops_of_a_call(processor, max_crops):
    picture = Image.new("RGB", (2000, 2000))
    made = processor.process("?", picture, images_kwargs={"max_crops": max_crops})
    assert len(made["images"]) == max_crops + 1
    fallback = processor.process("?", picture, max_crops=0)
    assert len(fallback["images"]) == 9 + 1
    placed = made["image_input_idx"][made["image_input_idx"] >= 0]
    patch = processor.special_ids()["<im_patch>"]
    assert placed.unique().numel() == placed.numel()
    assert torch.equal(placed.long().sort().values, (made["input_ids"] == patch).nonzero()[:, 0])


def test_stored_sizes_are_not_read(tmp_path):
    """As in the original; a processor made for other sizes says so."""
    import json

    folder = make_folder(tmp_path)
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_crops": 2}))
    processor = MolmoProcessor.from_pretrained(folder)
    assert processor.image_processor.max_crops == 2
    made = processor.process("?", Image.new("RGB", (2000, 2000)))
    assert len(made["images"]) == 9 + 1
    # Called by itself, the image processor is what the file made it.
    alone = processor.image_processor(Image.new("RGB", (2000, 2000)))
    assert len(alone["images"]) == 1 + 1


@pytest.mark.parametrize("size", [(1, 5000), (5000, 1), (2, 3000)])
def test_too_thin_to_tile(processor, size):
    with pytest.raises(ValueError, match=rf"image of {size[0]}x{size[1]} pixels is too thin"):
        processor.process("?", Image.new("RGB", size))


def test_arrays_and_modes(processor):
    pixels = np.asarray(stored("square").convert("RGB"))
    from_array = processor.process("?", pixels)["images"]
    assert torch.equal(from_array, processor.process("?", stored("square"))["images"])
    transparent = Image.merge(
        "RGBA", [*stored("square").convert("RGB").split(), Image.new("L", (400, 400))]
    )
    assert torch.equal(from_array, processor.process("?", transparent)["images"])
    with pytest.raises(ValueError, match=r"shape \(4, 5\): expected height x width x 3"):
        processor.process("?", np.zeros((4, 5)))
    with pytest.raises(TypeError, match="image of type str"):
        processor.process("?", "picture.png")


def test_batches_move_positions_along(processor):
    texts, pictures = (
        ["Short?", "A good deal longer?", "None"],
        [stored("gray"), stored("rgba"), None],
    )
    alone = [processor.process(t, p) for t, p in zip(texts, pictures, strict=True)]
    for side in ("left", "right"):
        batch = processor(text=texts, images=pictures, padding_side=side)
        longest = max(len(one["input_ids"]) for one in alone)
        assert batch["input_ids"].shape == (3, longest)
        assert batch["images"].shape == (3, 3, 576, 588)
        for row, one in enumerate(alone):
            real = batch["attention_mask"][row].bool()
            assert torch.equal(batch["input_ids"][row][real], one["input_ids"])
            assert (batch["input_ids"][row][~real] == processor.tokenizer.pad_token_id).all()
            assert bool(real[-1 if side == "left" else 0])
            if "images" not in one:
                assert (batch["images"][row] == -1).all()
                assert (batch["image_input_idx"][row] == -1).all()
                continue
            count = len(one["images"])
            shift = longest - len(one["input_ids"]) if side == "left" else 0
            index, wanted = batch["image_input_idx"][row, :count], one["image_input_idx"]
            assert torch.equal(index, torch.where(wanted < 0, wanted, wanted + shift))
            assert (batch["images"][row, count:] == -1).all()
            assert (batch["image_masks"][row, count:] == -1).all()
    with pytest.raises(ValueError, match="1 images for 3 prompts"):
        processor(text=texts, images=[None])
    with pytest.raises(ValueError, match="padding_side='middle'"):
        collate(alone, 0, "middle")


def test_unknown_options_are_refused(processor):
    with pytest.raises(
        TypeError, match=r"unknown processor options \['max_crop'\]; known: max_crops"
    ):
        processor.process("?", max_crop=3)
    processor.process("?", style="demo", sequence_length=5, system_prompt=None)
    with pytest.raises(ValueError, match="message_format='chat'"):
        processor.process("?", message_format="chat")


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="leave nothing of a crop"):
        tiling_spec({"overlap_margins": (12, 12)})
    with pytest.raises(ValueError, match="multiple of image_patch_size"):
        tiling_spec({"base_image_input_size": (330, 336)})


def test_a_tokenizer_without_image_tokens_is_refused(processor):
    from vlm_adapters.tiny import byte_tokenizer

    other = MolmoProcessor(
        processor.image_processor, byte_tokenizer(["<pad>", "<end>"], eos="<end>")
    )
    with pytest.raises(ValueError, match="no special token <im_start>"):
        other.process("?", stored("gray"))
    assert other.process("?")["input_ids"][0] == other.tokenizer.eos_token_id


def test_save_and_load(processor, tmp_path):
    processor.save_pretrained(tmp_path)
    again = MolmoProcessor.from_pretrained(tmp_path)
    before, after = (p.process("What?", stored("gray")) for p in (processor, again))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
