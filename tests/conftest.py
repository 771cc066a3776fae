"""Shared fixtures. Everything runs offline, on the CPU."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from pictures import picture, question


@pytest.fixture(scope="session")
def tiny_vlm():
    """A random Qwen3-VL-MoE: 3 MoE layers, 8 experts, top 2."""
    from vlm_adapters import load_model

    return load_model("tiny:qwen3_vl_moe")


@pytest.fixture(scope="session")
def one_question(tiny_vlm):
    """Inputs with one picture and a text."""
    return tiny_vlm.prepare(question("What is in this picture?", picture()))
