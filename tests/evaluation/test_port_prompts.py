"""Ports are asked what VLMEvalKit's own wrappers of the same models ask, down to the token."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from PIL import Image

from mm_capacity.evaluation.datasets import open_dataset
from mm_capacity.evaluation.plan import DEFAULT_NEW_TOKENS, DataChoice, ModelChoice, Plan
from mm_capacity.evaluation.prompts import PROMPTS, prompts_for
from mm_capacity.evaluation.prompts.base import Asked, Prompts
from mm_capacity.evaluation.prompts.molmoe import TRAINED_STYLES
from mm_capacity.evaluation.vlmeval_process import import_vlmeval
from tests.tsv import mmbench_rows, mme_rows, picture, to_base64, write_tsv
from vlm_adapters import ADAPTERS, load_model

pytestmark = pytest.mark.filterwarnings("ignore")


def row(number, question, seeds=(0,), **more):
    images = [to_base64(picture(seed, (30 + seed, 24))) for seed in seeds]
    image = images[0] if len(images) == 1 else str(images)
    return {"index": number, "image": image, "question": question, "answer": "A", **more}


ABCD = {"A": "one", "B": "two", "C": "", "D": "four"}
LETTERS = {"A": "K", "B": "B", "C": "C", "D": "H"}
MMMU = {"id": "x", "split": "validation", "category": "Art", "l2-category": "Art"}
TABLES = {
    "MMBench_DEV_EN": mmbench_rows(2),
    "MME": mme_rows(3),
    "ChartQA_TEST": [row(1, "How high is the bar?", split="test_human")],
    "TextVQA_VAL": [row(1, "What is\nwritten?")],
    "ScienceQA_VAL": [row(1, "Which one?", hint="Look.", category="x", **ABCD)],
    "AI2D_TEST": [
        row(1, "Which is the chamber?", abcLabel=True, category="x", **LETTERS),
        row(2, "What is it?", abcLabel=False, category="x", **LETTERS),
        row(3, "What is that?", abcLabel=True, category="x", **ABCD),
    ],
    "MMMU_DEV_VAL": [
        row(1, "See <image 1>. Which?", question_type="multiple-choice", **ABCD, **MMMU),
        row(2, "How many?", question_type="open", **dict.fromkeys("ABCD", ""), **MMMU),
        row(3, "<image 2> or <image 1>?", (1, 2), question_type="multiple-choice", **ABCD, **MMMU),
    ],
    "MathVista_MINI": [
        row(1, "Which?", question_type="multi_choice", **ABCD),
        row(2, "How many?", question_type="free_form", **dict.fromkeys("ABCD", "")),
    ],
    "BLINK": [row(1, "Which is nearer?", (3, 4), category="x", **ABCD)],
    "COCO_VAL": [row(1, "Describe it.")],
}


class Captured(Exception):
    """Carries what a wrapper handed to its processor."""


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    root = tmp_path_factory.mktemp("lmu")
    for name, rows in TABLES.items():
        write_tsv(root / f"{name}.tsv", rows)
    cache = {}

    def opened(name):
        if name not in cache:
            cache[name] = open_dataset(name, lmu_data=root)
        return cache[name]

    return opened


@pytest.fixture(scope="module")
def molmoe():
    from dataclasses import replace

    vlm = load_model("tiny:molmoe")
    return replace(vlm, extra={**vlm.extra, **prompts_for("molmoe").load_options})


@pytest.fixture(scope="module")
def deepseek():
    return load_model("tiny:deepseek_vl2")


def wrapper_message(wrapper, data, line):
    """What VLMEvalKit's inference loop hands to a wrapper (vlmeval/inference.py)."""
    wrapper.set_dump_image(data.dataset.dump_image)
    if wrapper.use_custom_prompt(data.name):
        return wrapper.build_prompt(line, dataset=data.name)
    return data.dataset.build_prompt(line)


def molmo_wrapper(processor, model=None):
    import_vlmeval()
    from vlmeval.vlm import molmo

    wrapper = object.__new__(molmo)
    wrapper.processor, wrapper.model, wrapper.max_crops = processor, model, 36
    return wrapper


def deepseek_wrapper(processor, monkeypatch):
    import_vlmeval()
    from vlmeval.vlm import DeepSeekVL2

    def load_pil_images(conversation):
        paths = [path for turn in conversation for path in turn.get("images", [])]
        return [Image.open(path).convert("RGB") for path in paths]

    io = SimpleNamespace(load_pil_images=load_pil_images)
    for name, module in {"": MagicMock(), ".utils": MagicMock(), ".utils.io": io}.items():
        monkeypatch.setitem(sys.modules, f"deepseek_vl2{name}", module)
    wrapper = object.__new__(DeepSeekVL2)
    wrapper.vl_chat_processor = processor
    return wrapper


def captured(wrapper, message, name):
    with pytest.raises(Captured) as caught:
        wrapper.generate(message, dataset=name)
    return caught.value.args[0]


def same(ours, theirs):
    assert set(theirs) <= set(ours)
    for key, value in theirs.items():
        assert torch.equal(ours[key], value), key


@pytest.mark.parametrize("name", TABLES)
def test_molmoe(opened, molmoe, name, monkeypatch):
    data = opened(name)
    if name.startswith("MMMU_"):
        # The wrapper imports this name from where the installed version does not have it.
        import vlmeval
        from vlmeval.dataset import MMMUDataset

        monkeypatch.setattr(vlmeval, "MMMUDataset", MMMUDataset, raising=False)

    def process(**arguments):
        # As asked: text, images and options go through the port's own processor.
        raise Captured({k: v[None] for k, v in molmoe.processor.process(**arguments).items()})

    wrapper = molmo_wrapper(SimpleNamespace(process=process))
    asked = Asked(data, prompts_for("molmoe"))
    for position, index in enumerate(data.frame["index"]):
        line = data.dataset.data.iloc[position]
        theirs = captured(wrapper, wrapper_message(wrapper, data, line), name)
        same(molmoe.prepare(asked.messages(index)), theirs)


@pytest.mark.parametrize("name", TABLES)
def test_deepseek_vl2(opened, deepseek, name, monkeypatch):
    data = opened(name)

    def process(**arguments):
        raise Captured(deepseek.processor(**arguments))

    wrapper = deepseek_wrapper(process, monkeypatch)
    asked = Asked(data, prompts_for("deepseek_vl2"))
    for position, index in enumerate(data.frame["index"]):
        line = data.dataset.data.iloc[position]
        theirs = captured(wrapper, wrapper_message(wrapper, data, line), name)
        same(deepseek.prepare(asked.messages(index)), theirs)


def test_molmoe_prompts_as_text(opened):
    def text(name, number):
        data = opened(name)
        asked = Asked(data, prompts_for("molmoe"))
        (message,) = asked.messages(data.frame["index"].tolist()[number])
        return "\n".join(part["text"] for part in message["content"] if part["type"] == "text")

    assert text("MMBench_DEV_EN", 0).startswith("a_okvqa_mc: A hint.\nWhat is shown")
    assert text("MME", 0) == "vqa2: Is it Yes 0? Please answer yes or no."
    assert text("ChartQA_TEST", 0) == "chart_qa: How high is the bar?"
    assert text("ScienceQA_VAL", 0) == "science_qa: Which one?"
    assert text("AI2D_TEST", 0) == "ai2_diagram_no_letter: Which is the chamber?\nK\nB\nC\nH"
    assert text("AI2D_TEST", 2) == "ai2_diagram: What is that?\nA: one\nB: two\nD: four"
    assert text("MathVista_MINI", 1) == "vqa2: How many?"


def test_style_words_are_those_of_the_wrapper():
    import_vlmeval()
    module = sys.modules["vlmeval.vlm.molmo"]
    theirs = dict(module.DATASET_PROMPTS)
    for name in ("AI2D_TEST", "AI2D_TEST_NO_MASK", "COCO_VAL"):  # handled, or never used
        theirs.pop(name)
    assert theirs == TRAINED_STYLES


@pytest.mark.parametrize("given", ["K", "H", "B", "A kiln", ""])
def test_ai2d_answers_become_letters(opened, given):
    data = opened("AI2D_TEST")
    model = MagicMock(device="cpu")
    model.generate_from_batch.return_value = torch.zeros(1, 5, dtype=torch.long)
    processor = SimpleNamespace(
        process=lambda **_: {"input_ids": torch.zeros(3, dtype=torch.long)},
        tokenizer=SimpleNamespace(decode=lambda *_, **__: given),
    )
    wrapper = molmo_wrapper(processor, model)
    asked = Asked(data, prompts_for("molmoe"))
    for position, index in enumerate(data.frame["index"]):
        message = wrapper_message(wrapper, data, data.dataset.data.iloc[position])
        try:
            theirs = wrapper.generate(message, dataset=data.name)
        except ValueError:  # not one of the options: the wrapper stops there
            theirs = given
        assert asked.answer(index, given) == theirs
    generation = model.generate_from_batch.call_args.args[1]
    assert generation.max_new_tokens == prompts_for("molmoe").max_new_tokens


def test_deepseek_answers_lose_full_stops(opened):
    data = opened("MME")
    asked = Asked(data, prompts_for("deepseek_vl2"))
    assert asked.answer(0, "Yes.") == "Yes" and asked.answer(0, "Fig. 3...") == "Fig. 3"


def test_longest_answer_of_deepseek(monkeypatch):
    deepseek_wrapper(None, monkeypatch)
    monkeypatch.setitem(sys.modules, "deepseek_vl2.models", MagicMock())
    module = sys.modules["vlmeval.vlm.deepseek_vl2"]
    monkeypatch.setattr(module, "AutoModelForCausalLM", MagicMock())
    wrapper = module.DeepSeekVL2("anything")
    assert wrapper.kwargs["max_new_tokens"] == prompts_for("deepseek_vl2").max_new_tokens
    assert wrapper.kwargs["do_sample"] is False


def test_longest_answers_in_a_plan():
    plan = Plan((), (), ())
    model, real, own = ModelChoice("m", "m"), DataChoice("MME", "MME"), DataChoice("x", "DIGITS_YN")
    assert plan.new_tokens(model, real, 200) == 200
    assert plan.new_tokens(model, real) == DEFAULT_NEW_TOKENS
    assert plan.new_tokens(model, own, 200) == 16
    assert plan.new_tokens(ModelChoice("m", "m", max_new_tokens=7), real, 200) == 7


def test_several_images_are_noted(opened):
    for name, words in (("BLINK", "side by side"), ("MMMU_DEV_VAL", "the first is used")):
        data = opened(name)
        asked = Asked(data, prompts_for("molmoe"))
        for index in data.frame["index"]:
            (message,) = asked.messages(index)
            assert sum(part["type"] == "image" for part in message["content"]) == 1
        (note,) = asked.notes
        assert words in note


def test_other_families_get_the_prompt_of_the_data_set(opened):
    data = opened("MMBench_DEV_EN")
    asked = Asked(data, prompts_for("qwen3_vl_moe"))
    assert type(asked.prompts) is Prompts and asked.prompts.name == "dataset"
    index = data.frame["index"].tolist()[0]
    texts = [part.get("text") for part in asked.messages(index)[0]["content"]]
    assert texts == [part.get("text") for part in data.messages(index)[0]["content"]]
    assert asked.answer(index, "A.") == "A." and not asked.notes


def test_registered_families_exist():
    assert set(PROMPTS) <= set(ADAPTERS)
    for family in PROMPTS:
        assert prompts_for(family).name == family
