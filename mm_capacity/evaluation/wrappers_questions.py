"""Questions as VLMEvalKit's inference puts them to a wrapper."""

from __future__ import annotations

import copy
import warnings
from typing import Any

from mm_capacity.evaluation.generate import Prepared, Preparer
from mm_capacity.evaluation.prompts.base import Prompts
from mm_capacity.evaluation.vlmeval_process import preserved_process


class WrapperPrompts(Prompts):
    """The wrapper's own prompt; what is asked is decided in :class:`WrapperPreparer`."""

    name = "vlmeval-wrapper"


class WrapperPreparer(Preparer):
    """Questions as a wrapper wants them: its own prompt where it has one."""

    def _prepare(self, indices: Any) -> Prepared:
        from mm_capacity.evaluation.datasets import BadQuestion

        (index,) = indices  # a wrapper is asked one question at a time
        data, wrapper = self.data.data, self.handle.vlm.wrapper
        parts: list[dict[str, Any]] = []

        def build(dataset: Any, line: Any) -> list[dict[str, Any]]:
            parts[:] = question_parts(wrapper, dataset, line, data.name)
            return copy.deepcopy(parts)

        try:
            data.messages(index, build=build)  # also checks that the images can be used
        except BadQuestion as error:
            return Prepared([], None, {index: str(error.reason)})
        return Prepared([index], {"message": parts, "dataset": data.name}, {})


def question_parts(wrapper: Any, dataset: Any, line: Any, name: str) -> list[dict[str, Any]]:
    """One question as VLMEvalKit's inference would put it to a wrapper.

    Args:
        wrapper: VLMEvalKit's model object.
        dataset: VLMEvalKit's data set object.
        line: the question's row.
        name: of the data set; wrappers choose their prompt by it. Embedded data sets are not
            known to them and keep their own prompt.

    Source: VLMEvalKit, vlmeval/inference.py (ms-vlmeval 0.0.20), behaviour only.
    """
    from mm_capacity.data.embedded import EMBEDDED

    with preserved_process():
        warnings.simplefilter("ignore")
        if hasattr(wrapper, "set_dump_image"):
            wrapper.set_dump_image(dataset.dump_image)
        own = name not in EMBEDDED and not getattr(dataset, "force_use_dataset_prompt", False)
        if own and hasattr(wrapper, "use_custom_prompt") and wrapper.use_custom_prompt(name):
            parts = wrapper.build_prompt(line, dataset=name)
        else:
            parts = dataset.build_prompt(line)
    if isinstance(parts, str):
        parts = [{"type": "text", "value": parts}]
    return [{**part, "value": str(part["value"])} for part in parts]
