"""VLMEvalKit's answer matchers that need a model."""

from __future__ import annotations

import tempfile
from pathlib import Path

from mm_capacity.errors import UserError
from mm_capacity.evaluation.vlmeval_process import first_line, import_vlmeval, vlmeval_session

EXACT_MATCHING = "exact_matching"
# Runs on this machine; making it only to look for a key would load its weights.
LOCAL_JUDGE = "llama31-8b"
# What VLMEvalKit says before it falls back to exact matching without being asked to.
SILENT_FALLBACK = "OPENAI API is not working properly"


def check_judge(judge: str) -> None:
    """Makes sure that a judge can be asked, without asking it.

    Raises:
        UserError: it needs an API key that is not set.
    """
    if judge in (EXACT_MATCHING, LOCAL_JUDGE):
        return
    import_vlmeval()
    from vlmeval.dataset.utils import build_judge

    with vlmeval_session(Path(tempfile.gettempdir())):
        try:
            model = build_judge(model=judge)
            problem = "" if getattr(model, "key", "-") else "no API key is set"
        except Exception as error:
            problem = first_line(error)
    if problem:
        raise UserError(
            f"judge {judge!r} cannot be used ({problem}): set OPENAI_API_KEY (SiliconFlow_API_KEY "
            f"for qwen-7b, qwen-72b, deepseek), or use {EXACT_MATCHING}"
        )
