"""VLMEvalKit's answer matchers that need a model."""

from __future__ import annotations

import tempfile
from pathlib import Path

from mm_capacity.errors import UserError
from mm_capacity.evaluation.suggest import unknown
from mm_capacity.evaluation.vlmeval_process import first_line, import_vlmeval, vlmeval_session

EXACT_MATCHING = "exact_matching"
# Short names that VLMEvalKit maps to a version; any other name goes to the API as it is.
SHORT_NAMES = (
    "gpt-4-turbo", "gpt-4-0613", "gpt-4-0125", "gpt-4-0409", "chatgpt-1106", "chatgpt-0125",
    "gpt-4o", "gpt-4o-0806", "gpt-4o-1120", "gpt-4o-mini", "qwen-7b", "qwen-72b", "deepseek",
)  # fmt: skip
# Runs on this machine; making it only to look for a key would load its weights.
LOCAL_JUDGE = "llama31-8b"
# What VLMEvalKit says before it falls back to exact matching without being asked to.
SILENT_FALLBACK = "OPENAI API is not working properly"


def check_judge(judge: str) -> None:
    """Makes sure that a judge can be asked, without asking it.

    Raises:
        UserError: it needs an API key that is not set; for a name that VLMEvalKit does not know,
            with the nearest one that it does.
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
    if problem and judge not in SHORT_NAMES:
        known = (EXACT_MATCHING, LOCAL_JUDGE, *SHORT_NAMES)
        raise UserError(
            f"{unknown('judge', judge, known)}; any other name is taken for a model of the API, "
            f"and {problem} (OPENAI_API_KEY)"
        )
    if problem:
        raise UserError(
            f"judge {judge!r} cannot be used ({problem}): set OPENAI_API_KEY (SiliconFlow_API_KEY "
            f"for qwen-7b, qwen-72b, deepseek), or use {EXACT_MATCHING}"
        )
