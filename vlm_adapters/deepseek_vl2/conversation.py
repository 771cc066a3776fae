"""Chat messages as the text that DeepSeek-VL2 was trained on, piece by piece between images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

USER, ASSISTANT = "<|User|>", "<|Assistant|>"
ROLES = {
    "user": USER,
    USER: USER,
    "assistant": ASSISTANT,
    ASSISTANT: ASSISTANT,
    "system": "system",
    "deepseekapi-sys": "system",
}


@dataclass
class Prompt:
    """A prompt before tokenisation.

    Attributes:
        turns: text of each turn with image markers, and whether the end-of-sentence id follows.
        images: one for each marker, in order.
    """

    turns: list[tuple[str, bool]] = field(default_factory=list)
    images: list[Any] = field(default_factory=list)


def read_conversation(messages: Sequence[Mapping[str, Any]], marker: str) -> Prompt:
    """Lays out a conversation; it ends where the assistant goes on writing.

    Args:
        messages: ``role`` (user, assistant, a leading system; or the original names) and
            ``content``: a text with image markers, its images in the message's ``images``; or a
            list of ``{"type": "text", "text": ...}`` and ``{"type": "image", "image": ...}``.
        marker: text that stands for an image.

    Raises:
        ValueError: an unknown role, roles that do not alternate, an unknown kind of part.
    """
    prompt = Prompt()
    expected: tuple[str, ...] = (USER, "system")
    for position, message in enumerate(messages):
        role = ROLES.get(message.get("role", ""))
        if role is None:
            raise ValueError(
                f"message {position}: unknown role {message.get('role')!r}; known: "
                f"{', '.join(ROLES)}"
            )
        if role not in expected:
            raise ValueError(
                f"message {position}: role {message['role']!r} is out of place; an optional system "
                "message comes first, then user and assistant take turns, the user first"
            )
        text, images = read_content(message, marker)
        prompt.images += images
        if role == USER:
            # The space after the first colon, and none after the second, are the trained format.
            prompt.turns.append((f"{USER}: {text.strip()}\n\n{ASSISTANT}:", False))
            expected = (ASSISTANT,)
        elif role == ASSISTANT:
            is_last = position == len(messages) - 1
            prompt.turns.append((text.strip(), not is_last))
            expected = (USER,)
        else:
            prompt.turns.append((text.strip(), False))
            expected = (USER,)
    if not any(text.startswith(USER) for text, _ in prompt.turns):
        raise ValueError("the conversation holds no user message")
    return prompt


def read_content(message: Mapping[str, Any], marker: str) -> tuple[str, list[Any]]:
    """Text with markers, and images, of one message.

    A content that is a text is taken as it is. In a list, an image part and what follows it stand
    on lines of their own, as in the model's own prompts; a text that starts with a line break
    brings it along. Where a text of the list holds markers itself, those alone say where the
    images stand.

    Raises:
        ValueError: an unknown kind of part, or the message's images and markers differ in number.
    """
    content = message.get("content") or ""
    images = list(message.get("images") or [])
    text = content if isinstance(content, str) else ""
    parts = [] if isinstance(content, str) else content
    explicit = any(marker in (part.get("text") or "") for part in parts)
    for part in parts:
        kind, addition = part.get("type"), part.get("text") or ""
        if kind == "image":
            if part.get("image") is None:
                raise ValueError("an image part needs its PIL image under 'image'")
            images.append(part["image"])
            addition = "" if explicit else marker
        elif kind != "text":
            raise ValueError(f"unknown kind of content part {kind!r}; known: text, image")
        if text.endswith(marker) and not explicit and addition and addition[0] != "\n":
            text += "\n"
        text += addition
    if images:
        check_count(text.count(marker), len(images), marker)
    return text, images


def check_count(markers: int, images: int, marker: str) -> None:
    """Raises ValueError unless there is one marker for each image."""
    if markers != images:
        raise ValueError(
            f"the prompt has {markers} {marker} marker(s) but {images} image(s) are given; each "
            "image needs one marker"
        )
