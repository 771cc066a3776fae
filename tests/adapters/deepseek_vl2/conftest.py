"""Checkpoint folders as on the hub, loaded models and recorded samples for the tests here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dsvl2_data import assemble

from vlm_adapters.deepseek_vl2.adapter import DeepseekVL2Adapter


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[str], Path]:
    """Makes a checkpoint folder of a recorded model, free to be changed."""
    return lambda kind: assemble(kind, tmp_path / kind)


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """A recorded model, loaded once; tests leave it as it is."""
    loaded: dict[str, Any] = {}

    def get(kind: str) -> Any:
        if kind not in loaded:
            target = assemble(kind, tmp_path_factory.mktemp("checkpoint") / kind)
            loaded[kind] = DeepseekVL2Adapter.load(str(target))
        return loaded[kind]

    return get
