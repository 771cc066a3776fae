"""The one place where vlmeval is imported, and where what it does to the process is undone.

Measured with ms-vlmeval 0.0.20, its import: switches torch gradients off globally; makes TLS
certificates unchecked for every HTTPS client of the standard library; reseeds torch and draws
from ``random``; sets some twenty environment variables (also PATH); lengthens ``sys.path``;
adds a handler to the root logger and logs an error about a missing ``.env`` file; adds warning
filters; lifts Pillow's limit on image size. Its scoring code may also change directory or set
an alarm handler. All of that is put back. What stays: entries of ``sys.modules``, the loggers
of the libraries that it imports, and the alias ``numpy.asscalar``.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import random
import signal
import ssl
import sys
import threading
import warnings
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.metadata import distribution, packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from urllib.parse import urlsplit
from urllib.request import url2pathname

from mm_capacity.errors import UserError

DISTRIBUTION = "ms-vlmeval"
PINNED_VERSION = "0.0.20"

# What this toolkit calls; other distributions and versions may lack some of it.
NEEDED: dict[str, tuple[str, ...]] = {
    "vlmeval.config": ("supported_VLM",),
    "vlmeval.dataset": (
        "CUSTOM_DATASET",
        "CustomMCQDataset",
        "CustomVQADataset",
        "DATASET_CLASSES",
        "DATASET_COLLECTION",
        "IMAGE_DATASET",
        "ImageMCQDataset",
        "ImageYORNDataset",
        "img_root_map",
        "supported_video_datasets",
    ),
    "vlmeval.dataset.utils": ("build_judge",),
    "vlmeval.smp": ("download_file", "dump", "get_intermediate_file_path", "load", "toliststr"),
}

# Settings of VLMEvalKit itself. PRED_FORMAT: its spreadsheets turn an answer that begins with
# "=" into a formula. PRINT_VANILLA: its own accuracy beside the circular one. VERBOSE: a value,
# even "0", makes its matcher refuse the letter A in longer answers.
SETTINGS: dict[str, str | None] = {
    "PRED_FORMAT": "tsv",
    "EVAL_FORMAT": "csv",
    "PRINT_VANILLA": "1",
    "VERBOSE": None,
}


@contextlib.contextmanager
def preserved_process() -> Iterator[None]:
    """Puts back, on exit, everything of this process that VLMEvalKit is known to change."""
    import numpy as np
    import torch
    from PIL import Image

    root = logging.getLogger()
    handlers, level, disabled = root.handlers[:], root.level, logging.root.manager.disable
    environment, path, folder = dict(os.environ), sys.path[:], os.getcwd()
    https_context = ssl._create_default_https_context
    if "vlmeval" in sys.modules and https_context is ssl._create_unverified_context:
        # Somebody else imported it, before us: verification comes back all the same.
        https_context = ssl.create_default_context
    max_pixels = Image.MAX_IMAGE_PIXELS
    python_random, numpy_random = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    gradients = torch.is_grad_enabled()
    # Handlers can only be set in the main thread, and only there does scoring set one.
    main_thread = threading.current_thread() is threading.main_thread()
    alarm = signal.getsignal(signal.SIGALRM) if hasattr(signal, "SIGALRM") else None
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=devices):
            yield
    finally:
        torch.set_grad_enabled(gradients)
        ssl._create_default_https_context = https_context
        root.handlers[:] = handlers
        root.setLevel(level)
        logging.disable(disabled)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        sys.path[:] = path
        os.chdir(folder)
        Image.MAX_IMAGE_PIXELS = max_pixels
        random.setstate(python_random)
        np.random.set_state(numpy_random)
        if main_thread and alarm is not None and signal.getsignal(signal.SIGALRM) is not alarm:
            signal.signal(signal.SIGALRM, alarm)


@cache
def import_vlmeval() -> ModuleType:
    """Imports VLMEvalKit and leaves the process as it was.

    Returns:
        The module ``vlmeval``; its submodules ``dataset``, ``smp`` and ``config`` are loaded.

    Raises:
        UserError: it is not installed, installed twice, cannot be imported, or lacks what this
            toolkit calls.
    """
    check_distributions()
    with preserved_process():
        logging.disable(logging.CRITICAL)
        warnings.simplefilter("ignore")
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                module = import_module("vlmeval")
                for name in ("dataset", "smp", "config"):
                    import_module(f"vlmeval.{name}")
                check_contents()
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"vlmeval cannot be imported: {first_line(error)}") from error
    return module


def check_distributions() -> None:
    """Makes sure that exactly one copy of ``vlmeval`` can be meant.

    One distribution may provide it, under any name (``ms-vlmeval``; ``vlmeval`` from the upstream
    repository; ``nvidia-vlmeval``), or a source tree on the path without any metadata.

    Raises:
        UserError: there is none; there are several distributions, which overwrite each other's
            files, so nobody could tell whose answer matcher runs; or a source tree on the path
            hides the installed one.
    """
    found = providers()
    if len(found) > 1:
        names = ", ".join(f"{name} {version(name)}" for name in found)
        raise UserError(
            f"{len(found)} installed distributions provide 'vlmeval' ({names}): uninstall all of "
            f"them, then pip install {DISTRIBUTION}=={PINNED_VERSION}"
        )
    folder = source_folder()
    if folder is None:
        if not found:
            raise UserError(
                f"vlmeval is not installed: pip install {DISTRIBUTION}=={PINNED_VERSION}"
            )
        return
    if found and not provides(found[0], folder):
        raise UserError(
            f"two copies of vlmeval: {found[0]} {version(found[0])} is installed, but {folder} "
            "comes first on the path and would be imported; start from another folder, take it "
            "off PYTHONPATH, or uninstall the other"
        )


def providers() -> list[str]:
    """Names of the installed distributions that provide ``vlmeval``."""
    return sorted(set(packages_distributions().get("vlmeval", [])))


def source_folder() -> Path | None:
    """The package folder that ``import vlmeval`` would take, None if there is none."""
    spec = find_spec("vlmeval")
    origin = getattr(spec, "origin", None)
    return Path(origin).parent if origin and Path(origin).is_file() else None


def provides(name: str, folder: Path) -> bool:
    """Whether a package folder belongs to a distribution, also to one installed as editable."""
    found = distribution(name)
    if Path(str(found.locate_file("vlmeval"))).resolve() == folder.resolve():
        return True
    linked = found.read_text("direct_url.json")
    url = json.loads(linked).get("url", "") if linked else ""
    root = Path(url2pathname(urlsplit(url).path)).resolve()
    return url.startswith("file:") and root in folder.resolve().parents


def check_contents() -> None:
    """Makes sure that the imported copy has what this toolkit calls.

    Raises:
        UserError: it has not: another version, or another distribution that differs.
    """
    for module_name, names in NEEDED.items():
        module = sys.modules.get(module_name) or import_module(module_name)
        missing = [name for name in names if not hasattr(module, name)]
        if missing:
            whose = ", ".join(f"{name} {version(name)}" for name in providers())
            raise UserError(
                f"the installed vlmeval ({whose or source_folder()}) has no "
                f"{module_name}.{missing[0]}, which scoring and prompts need: pip install "
                f"{DISTRIBUTION}=={PINNED_VERSION} in its place"
            )


@contextlib.contextmanager
def vlmeval_session(lmu_data: Path) -> Iterator[None]:
    """What VLMEvalKit's code runs under: fixed settings, its data root, quiet loggers.

    Args:
        lmu_data: folder that VLMEvalKit takes as LMUData; it must exist, since VLMEvalKit
            otherwise makes one in the home folder.
    """
    logger = logging.getLogger("vlmeval")
    level = logger.level
    with preserved_process():
        os.environ["LMUData"] = str(lmu_data)
        for name, value in SETTINGS.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        # Below this level VLMEvalKit logs API keys.
        logger.setLevel(logging.WARNING)
        try:
            yield
        finally:
            logger.setLevel(level)


def first_line(error: BaseException) -> str:
    """ "ValueError: what happened", on one line and not endless."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    name = type(error).__name__
    return f"{name}: {text[:300]}" if text else name
