"""Finds every model class of the installed transformers that takes images and contains experts.

The scan reads source text and imports neither torch nor transformers. It does not go by names of
families: a class is an *experts class* if its forward takes index and weights (the seam), or if it
counts experts without that (then it needs an adapter of its own). A model class *contains* experts
if it builds one, directly or through other classes of its file, or if it builds its language model
from a configuration that by default is a mixture of experts. Model classes that build their
language model from whatever configuration they are given are *wrappers*.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

from .router_formula import RouterFormula, formula_of_source

CLASS = re.compile(r"(?m)^class (\w+)\(([^)]*)\):\n(?:(?:[ \t].*)?\n)*")
FORWARD = re.compile(r"def forward\(([\s\S]*?)\)(?: ->[^\n]*)?:")
PIXELS = re.compile(r"\bpixel_values\w*")
SEAMS = (("top_k_index", "top_k_weights"), ("router_indices", "routing_weights"))
ANY_LANGUAGE_MODEL = re.compile(
    r"AutoModel\w*\.(?:_from_config|from_config)\(\s*(?:self\.)?config\.(?:text_config|get_text)"
)
COUNTS_EXPERTS = re.compile(r"self\.num_experts\s*=")
COMMENTS = re.compile(r'r?"""[\s\S]*?"""|#[^\n]*')
NAME = re.compile(r"\b[A-Z]\w+")
EXPERTS_NAME = re.compile(r"Experts|Moe|MoE")


@dataclass(frozen=True)
class Family:
    """A folder of transformers with image-taking model classes that contain experts.

    Attributes:
        name: the folder.
        classes: the model classes, sorted.
        language_model: folder that holds the experts.
        experts: experts classes.
        seam: whether all of them have the seam.
        formulas: what the routers compute; empty if it cannot be read.
    """

    name: str
    classes: tuple[str, ...]
    language_model: str
    experts: tuple[str, ...]
    seam: bool
    formulas: tuple[RouterFormula, ...] = ()


@dataclass
class _Class:
    name: str
    bases: tuple[str, ...]
    text: str
    uses: set[str] = field(default_factory=set)

    @property
    def arguments(self) -> str:
        return " ".join(FORWARD.findall(self.text))

    @property
    def has_seam(self) -> bool:
        return any(all(name in self.arguments for name in pair) for pair in SEAMS)

    @property
    def is_experts(self) -> bool:
        counts = COUNTS_EXPERTS.search(self.text) and EXPERTS_NAME.search(self.name)
        return bool(self.has_seam or (counts and "nn.Module" in self.bases))

    @property
    def is_router(self) -> bool:
        return "topk(" in self.text and "Router" in self.name


def models_folder() -> Path:
    """The folder ``transformers/models`` of the installed package.

    Raises:
        ImportError: transformers is not installed.
    """
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("transformers is not installed")
    return Path(next(iter(spec.submodule_search_locations))) / "models"


@lru_cache(maxsize=1)
def scan() -> tuple[tuple[Family, ...], tuple[str, ...]]:
    """The families, and the folders of wrappers around any language model.

    Wrappers whose default language model is a mixture of experts are families.
    """
    families, wrappers = [], []
    folders = {path.name: path for path in sorted(models_folder().iterdir()) if path.is_dir()}
    pictured = {name for name, path in folders.items() if _mentions_pixels(path)}
    for name in sorted(pictured):
        folder = folders[name]
        classes = _classes(folder)
        takers = [c for c in classes.values() if _takes_images(c, classes)]
        if not takers:
            continue
        family = _family(name, takers, classes)
        inner = _default_language_model(folder)
        if family is None and inner in folders and inner != name:
            open_to_any = [c for c in takers if ANY_LANGUAGE_MODEL.search(_reach_text(c, classes))]
            if open_to_any:
                family = _family(name, open_to_any, _classes(folders[inner]), inner)
            # Detectors and encoders have a text model too, but answer nothing.
            answers = any(c.name.endswith(("Generation", "ForCausalLM")) for c in open_to_any)
            if family is None and answers:
                wrappers.append(name)
        if family is not None:
            families.append(family)
    return tuple(families), tuple(wrappers)


def transformers_version() -> str:
    """Version of the installed transformers."""
    return version("transformers")


def _family(
    name: str, takers: list[_Class], classes: dict[str, _Class], inner: str | None = None
) -> Family | None:
    """The family of those image-taking classes that contain experts, None if none does."""
    found: dict[str, _Class] = {}
    containing = []
    for taker in takers:
        # In another folder the language model is whatever that folder holds.
        parts = list(classes.values()) if inner else list(_reach(taker, classes))
        experts = [part for part in parts if part.is_experts and not part.is_router]
        if experts:
            containing.append(taker.name)
            found.update({part.name: part for part in parts})
    if not containing:
        return None
    experts = [part for part in found.values() if part.is_experts and not part.is_router]
    # A block that counts its experts stands for itself only where no class has the seam.
    named = [part for part in experts if part.has_seam]
    named = named or [part for part in experts if part.name.endswith("Experts")] or experts
    formulas = [formula_of_source(part.text) for part in found.values() if part.is_router]
    return Family(
        name=name,
        classes=tuple(sorted(containing)),
        language_model=inner or name,
        experts=tuple(sorted(part.name for part in named)),
        seam=all(part.has_seam for part in named),
        formulas=tuple(dict.fromkeys(f for f in formulas if f is not None)),
    )


def _mentions_pixels(folder: Path) -> bool:
    return any(b"pixel_values" in path.read_bytes() for path in folder.glob("modeling_*.py"))


def _classes(folder: Path) -> dict[str, _Class]:
    """Classes of a folder's modeling files, with the names that each mentions."""
    classes: dict[str, _Class] = {}
    for path in sorted(folder.glob("modeling_*.py")):
        text = COMMENTS.sub("", path.read_text(encoding="utf-8"))
        for match in CLASS.finditer(text):
            bases = tuple(base.strip() for base in match[2].split(","))
            classes[match[1]] = _Class(match[1], bases, match[0])
    # The common base class names the parts of every model, to initialise them.
    parts = {name for name in classes if not name.endswith("PreTrainedModel")}
    for each in classes.values():
        each.uses = set(NAME.findall(each.text)) & parts - {each.name}
    return classes


def _reach(start: _Class, classes: dict[str, _Class]) -> Iterator[_Class]:
    """A class and everything that it builds, directly or not."""
    seen, todo = {start.name}, [start.name]
    while todo:
        each = classes[todo.pop()]
        yield each
        fresh = each.uses - seen
        if ANY_LANGUAGE_MODEL.search(each.text):
            # Built through AutoModel from a configuration of the same folder.
            fresh |= {n for n in classes if n.endswith(("TextModel", "TextForCausalLM"))} - seen
        seen |= fresh
        todo += sorted(fresh)


def _reach_text(start: _Class, classes: dict[str, _Class]) -> str:
    return "\n".join(each.text for each in _reach(start, classes))


def _takes_images(each: _Class, classes: dict[str, _Class]) -> bool:
    """Whether a class is a model that takes pixels, itself or in a model that it builds."""
    if not _is_model(each, classes):
        return False
    return any(
        PIXELS.search(part.arguments) for part in _reach(each, classes) if _is_model(part, classes)
    )


def _is_model(each: _Class, classes: dict[str, _Class]) -> bool:
    """Whether a class descends from PreTrainedModel and is not a mere base class."""
    todo = [] if each.name.endswith("PreTrainedModel") else [each.name]
    while todo:
        name = todo.pop()
        if "PreTrainedModel" in name and name != each.name:
            return True
        todo += classes[name].bases if name in classes else ()
    return False


def _default_language_model(folder: Path) -> str | None:
    """Folder of the default language model that a configuration names by its model type."""
    for path in sorted(folder.glob("configuration_*.py")):
        match = re.search(
            r'"text_config":\s*SubConfigSpec\([^)]*model_type="([\w-]+)"',
            path.read_text(encoding="utf-8"),
        )
        if match:
            return match[1].replace("-", "_").removesuffix("_text")
    return None
