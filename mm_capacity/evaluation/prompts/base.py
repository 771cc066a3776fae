"""The contract between a data set's question and what one family of models is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

Parts = list[dict[str, Any]]
Messages = list[dict[str, Any]]


class Prompts:
    """The data set's own prompt, unchanged; the base of the families that want another one.

    Attributes:
        name: what the record says.
        max_new_tokens: longest answer in tokens, None for the runner's default.
        load_options: further arguments of :func:`vlm_adapters.load_model`.
    """

    name: ClassVar[str] = "dataset"
    max_new_tokens: ClassVar[int | None] = None
    load_options: ClassVar[Mapping[str, Any]] = {}

    def builds(self, dataset: Any) -> bool:
        """Whether :meth:`build` replaces the data set's own prompt."""
        return False

    def build(self, dataset: Any, line: Any) -> Parts:
        """One question as VLMEvalKit's parts.

        Args:
            dataset: VLMEvalKit's data set object.
            line: the question's row.

        Returns:
            ``{"type": "text" or "image", "value": text or path}`` in order.
        """
        raise NotImplementedError

    def shape(self, messages: Messages, dataset_name: str) -> tuple[Messages, str | None]:
        """The last step before the processor, on opened images.

        Returns:
            The messages for ``vlm.prepare``, and what the record should mention, if anything.
        """
        return messages, None

    def answer(self, text: str, dataset: Any, line: Any) -> str:
        """The model's answer as it is recorded and scored."""
        return text


@dataclass
class Asked:
    """A data set as one family is asked it.

    Attributes:
        data: :class:`mm_capacity.evaluation.datasets.EvalData`.
        prompts: the family's way of asking.
        notes: what the record should mention, each text once.
    """

    data: Any
    prompts: Prompts
    notes: dict[str, None] = field(default_factory=dict)

    def messages(self, index: Any) -> Messages:
        """One question as chat messages.

        Raises:
            BadQuestion: its image cannot be used.
        """
        if self.prompts.builds(self.data.dataset):
            messages = self.data.messages(index, build=self.prompts.build)
        else:
            messages = self.data.messages(index)
        messages, note = self.prompts.shape(messages, self.data.name)
        if note is not None:
            self.notes[note] = None
        return messages

    def answer(self, index: Any, text: str) -> str:
        """The answer to one question as it is recorded."""
        return self.prompts.answer(text, self.data.dataset, self.data.line(index))


def image_paths(dataset: Any, line: Any) -> list[str]:
    """Files of a question's images, written by the data set where its table holds the pixels."""
    if getattr(dataset, "meta_only", False):
        from vlmeval.smp import toliststr

        return toliststr(line["image_path"])
    paths = dataset.dump_image(line)
    return [paths] if isinstance(paths, str) else list(paths)
