"""A small byte-level BPE tokenizer for the embedded model.

It encodes any text (byte fallback through the byte-level alphabet), digits one by one,
and the two instruction sentences that VLMEvalKit adds to every question as one token
each, which keeps image tokens above three quarters of a prompt.
"""

from __future__ import annotations

import random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mm_capacity.data.digits import ASKERS, COLOUR_NAMES, PLACES, draw_scene
from vlm_adapters.tiny import CHATML

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
INSTRUCTIONS = (
    "Please select the correct answer from the options above. \n",
    " Please answer yes or no.",
)


def _corpus(n_questions: int = 4000) -> list[str]:
    """Text that the merges are learned from: the words of the questions and their frames."""
    rng = random.Random(7)
    lines = []
    names = list(ASKERS)
    scenes = [draw_scene(rng, "train") for _ in range(64)]
    for i in range(n_questions):
        question = ASKERS[names[i % len(names)]](rng, scenes[i % len(scenes)])
        if question is None:
            continue
        options = "".join(f"{k}. {v}\n" for k, v in zip("ABCD", question.wrong, strict=False))
        lines.append(f"Question: {question.text}\nOptions:\n{options}")
        lines.append(question.claim.format(question.answer) + " yes no")
        letters = "ABCD" if i % 2 else "BADC"
        lines += [
            f"{w} {k}" for w, k in zip((question.answer, *question.wrong), letters, strict=False)
        ]
    words = " ".join(COLOUR_NAMES) + " none " + " ".join(PLACES)
    lines += [f"user\nRead all digits. assistant\n{words} Hint: {words}\n"] * 200
    return lines


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Trains the tokenizer; deterministic."""
    tokenizer = Tokenizer(models.BPE())
    pattern = r" ?\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+\n*|\s+(?!\S)|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        min_frequency=20,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.add_tokens([AddedToken(s, normalized=False) for s in INSTRUCTIONS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        model_max_length=4096,
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
    )
