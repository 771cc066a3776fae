"""vlmeval is imported in one place, and the process is as before afterwards."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import ssl
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mm_capacity.errors import UserError
from mm_capacity.evaluation import vlmeval_process
from mm_capacity.evaluation.vlmeval_process import (
    check_distributions,
    import_vlmeval,
    preserved_process,
    vlmeval_session,
)

ROOT = Path(__file__).resolve().parents[2]

# What a process has that an import might change; run before and after, in a fresh interpreter.
SNAPSHOT = """
import http.client, json, logging, os, random, signal, ssl, sys, warnings
import matplotlib, numpy as np, pandas as pd, torch
from PIL import Image, ImageFile
import sklearn, transformers

def state():
    import pandas._config.config as options
    root = logging.getLogger()
    context = http.client.HTTPSConnection("localhost")._context
    return {
        "gradients": torch.is_grad_enabled(),
        "tls": [str(ssl._create_default_https_context), str(context.verify_mode),
                context.check_hostname],
        "environment": dict(os.environ),
        "path": sys.path[:],
        "folder": os.getcwd(),
        "root logger": [str(root.handlers), root.level, logging.root.manager.disable],
        "warnings": [str(f) for f in warnings.filters],
        "signals": {str(s): str(signal.getsignal(s)) for s in signal.valid_signals()},
        "random": [hash(random.getstate()), str(np.random.get_state()),
                   torch.get_rng_state().tolist()],
        "pixels": [Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES],
        "pandas": str(options._global_config),
        "numpy": [str(np.get_printoptions()), str(np.geterr())],
        "matplotlib": {k: str(v) for k, v in dict.items(matplotlib.rcParams)},
        "torch": [str(torch.get_default_dtype()), torch.are_deterministic_algorithms_enabled(),
                  torch.get_float32_matmul_precision(), torch.get_num_threads()],
        "hooks": [str(sys.excepthook), str(warnings.showwarning)],
        "transformers": transformers.logging.get_verbosity(),
    }

before = state()
from mm_capacity.evaluation.vlmeval_process import import_vlmeval
import_vlmeval()
after = state()
import vlmeval.vlm  # The module that switches gradients off was really loaded.
print(json.dumps({key: [before[key], after[key]] for key in before if before[key] != after[key]}))
"""


@pytest.fixture(scope="module")
def fresh_import():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", SNAPSHOT],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
        timeout=300,
    )


def test_import_leaves_the_process_as_it_was(fresh_import):
    assert fresh_import.returncode == 0, fresh_import.stderr
    assert json.loads(fresh_import.stdout.splitlines()[-1]) == {}


def test_import_says_nothing(fresh_import):
    assert len(fresh_import.stdout.splitlines()) == 1
    assert ".env" not in fresh_import.stderr
    assert "ERROR" not in fresh_import.stderr


def test_opening_module_is_light():
    heavy = "{'torch', 'transformers', 'vlmeval'} & set(sys.modules)"
    code = (
        "import sys; from mm_capacity.evaluation.datasets import known_datasets; "
        f"assert 'DIGITS_MCQ' in known_datasets(); assert not {heavy}, {heavy}"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=60)


def test_preserved_process_undoes_every_change(monkeypatch, tmp_path):
    monkeypatch.setenv("KEPT", "before")
    folder, path, root = os.getcwd(), sys.path[:], logging.getLogger()
    handlers, filters = root.handlers[:], warnings.filters[:]
    pixels, alarm = Image.MAX_IMAGE_PIXELS, signal.getsignal(signal.SIGALRM)
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    with pytest.raises(RuntimeError), preserved_process():
        torch.set_grad_enabled(False)
        torch.manual_seed(1234)
        ssl._create_default_https_context = ssl._create_unverified_context
        os.environ["KEPT"] = "after"
        os.environ["ADDED"] = "1"
        sys.path.append("/nowhere")
        os.chdir(tmp_path)
        root.addHandler(logging.NullHandler())
        logging.disable(logging.CRITICAL)
        warnings.simplefilter("ignore")
        Image.MAX_IMAGE_PIXELS = None
        random.random()
        np.random.random()
        signal.signal(signal.SIGALRM, lambda *_: None)
        raise RuntimeError
    assert torch.is_grad_enabled()
    assert ssl._create_default_https_context is ssl.create_default_context
    assert os.environ["KEPT"] == "before" and "ADDED" not in os.environ
    assert (os.getcwd(), sys.path) == (folder, path)
    assert root.handlers == handlers and logging.root.manager.disable == 0
    assert warnings.filters == filters
    assert Image.MAX_IMAGE_PIXELS == pixels
    assert signal.getsignal(signal.SIGALRM) is alarm
    assert random.getstate() == states[0]
    assert (np.random.get_state()[1] == states[1]).all()
    assert torch.equal(torch.get_rng_state(), states[2])


def test_preserved_process_keeps_gradients_off_where_they_were_off():
    with torch.no_grad(), preserved_process():
        torch.set_grad_enabled(True)
    with torch.no_grad():
        with preserved_process():
            torch.set_grad_enabled(True)
        assert not torch.is_grad_enabled()


def test_verification_returns_when_somebody_else_imported_vlmeval(monkeypatch):
    import_vlmeval()
    monkeypatch.setattr(ssl, "_create_default_https_context", ssl._create_unverified_context)
    with preserved_process():
        pass
    assert ssl._create_default_https_context is ssl.create_default_context


def test_two_distributions_are_refused(monkeypatch):
    monkeypatch.setattr(
        vlmeval_process, "packages_distributions", lambda: {"vlmeval": ["vlmeval", "ms-vlmeval"]}
    )
    monkeypatch.setattr(vlmeval_process, "version", {"vlmeval": "0.1", "ms-vlmeval": "0.0.20"}.get)
    with pytest.raises(UserError) as caught:
        check_distributions()
    message = str(caught.value)
    assert "ms-vlmeval 0.0.20, vlmeval 0.1" in message
    assert "pip install ms-vlmeval==0.0.20" in message and "\n" not in message


def test_one_distribution_listed_twice_is_fine(monkeypatch):
    monkeypatch.setattr(
        vlmeval_process, "packages_distributions", lambda: {"vlmeval": ["ms-vlmeval"] * 2}
    )
    check_distributions()


def test_missing_vlmeval(monkeypatch):
    monkeypatch.setattr(vlmeval_process, "packages_distributions", dict)
    monkeypatch.setattr(vlmeval_process, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install ms-vlmeval==0.0.20"):
        check_distributions()


def test_broken_vlmeval_is_one_line(monkeypatch):
    def broken(name):
        raise ImportError("libGL.so.1: cannot open\nsecond line")

    monkeypatch.setattr(vlmeval_process, "import_module", broken)
    with pytest.raises(UserError) as caught:
        import_vlmeval.__wrapped__()
    assert str(caught.value) == ("vlmeval cannot be imported: ImportError: libGL.so.1: cannot open")


def test_session_settings_hold_only_inside(monkeypatch, tmp_path):
    import_vlmeval()
    monkeypatch.setenv("VERBOSE", "0")
    monkeypatch.setenv("PRED_FORMAT", "xlsx")
    monkeypatch.delenv("LMUData", raising=False)
    with vlmeval_session(tmp_path):
        from vlmeval.smp import LMUDataRoot

        assert LMUDataRoot() == str(tmp_path)
        assert os.environ["PRED_FORMAT"] == "tsv" and "VERBOSE" not in os.environ
    assert os.environ["VERBOSE"] == "0" and os.environ["PRED_FORMAT"] == "xlsx"
    assert "LMUData" not in os.environ


def source_tree(folder: Path) -> Path:
    """A folder with a package ``vlmeval`` and no metadata, as a checkout is."""
    package = folder / "vlmeval"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    return package


def looked_up_in(monkeypatch, folder: Path) -> None:
    """``import vlmeval`` would take the copy in that folder."""
    from importlib.machinery import PathFinder

    monkeypatch.setattr(
        vlmeval_process, "find_spec", lambda name: PathFinder.find_spec(name, [str(folder)])
    )


def test_a_source_tree_without_metadata_is_fine(monkeypatch, tmp_path):
    source_tree(tmp_path)
    looked_up_in(monkeypatch, tmp_path)
    monkeypatch.setattr(vlmeval_process, "packages_distributions", dict)
    check_distributions()


def test_a_source_tree_in_front_of_the_installed_one_is_refused(monkeypatch, tmp_path):
    package = source_tree(tmp_path)
    looked_up_in(monkeypatch, tmp_path)
    with pytest.raises(UserError, match="two copies of vlmeval: ms-vlmeval 0.0.20") as caught:
        check_distributions()
    assert str(package) in str(caught.value) and "\n" not in str(caught.value)


def installed_as(site: Path, name: str, *, editable: Path | None = None) -> None:
    """Metadata of a distribution that provides ``vlmeval``."""
    info = site / f"{name.replace('-', '_')}-0.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.2\n")
    (info / "top_level.txt").write_text("vlmeval\n")
    if editable is not None:
        url = {"url": editable.as_uri(), "dir_info": {"editable": True}}
        (info / "direct_url.json").write_text(json.dumps(url))


@pytest.fixture
def only_from(monkeypatch):
    """Distributions of one folder only, as in another environment."""
    from importlib import metadata

    def only_from(site: Path) -> None:
        def distributions():
            return metadata.distributions(path=[str(site)])

        def provided():
            names = {"vlmeval": [d.metadata["Name"] for d in distributions()]}
            return names if names["vlmeval"] else {}

        def one(name):
            return next(d for d in distributions() if d.metadata["Name"] == name)

        monkeypatch.setattr(vlmeval_process, "packages_distributions", provided)
        monkeypatch.setattr(vlmeval_process, "distribution", one)
        monkeypatch.setattr(vlmeval_process, "version", lambda name: one(name).version)

    return only_from


@pytest.mark.parametrize("name", ["vlmeval", "nvidia-vlmeval"])
def test_other_distributions_are_taken(monkeypatch, tmp_path, only_from, name):
    source_tree(tmp_path)
    installed_as(tmp_path, name)
    looked_up_in(monkeypatch, tmp_path)
    only_from(tmp_path)
    check_distributions()


def test_an_editable_install_is_one_copy(monkeypatch, tmp_path, only_from):
    source_tree(tmp_path / "checkout")
    installed_as(tmp_path / "site", "vlmeval", editable=tmp_path / "checkout")
    looked_up_in(monkeypatch, tmp_path / "checkout")
    only_from(tmp_path / "site")
    check_distributions()
    installed_as(tmp_path / "site", "nvidia-vlmeval")
    with pytest.raises(UserError, match="2 installed distributions"):
        check_distributions()


def test_a_copy_that_lacks_something_is_refused(monkeypatch):
    import vlmeval.dataset

    vlmeval_process.check_contents()
    monkeypatch.delattr(vlmeval.dataset, "DATASET_COLLECTION")
    with pytest.raises(UserError, match=r"ms-vlmeval 0\.0\.20\) has no vlmeval\.dataset\.DATASET_"):
        vlmeval_process.check_contents()


def test_another_copy_is_named_in_the_record(monkeypatch, tmp_path, only_from):
    from importlib.metadata import PackageNotFoundError

    from mm_capacity.evaluation import environment

    def absent(name):
        if name == "ms-vlmeval":
            raise PackageNotFoundError(name)
        return {"nvidia-vlmeval": "0.2"}.get(name, "1")

    monkeypatch.setattr(environment, "version", absent)
    package = source_tree(tmp_path)
    looked_up_in(monkeypatch, tmp_path)
    only_from(tmp_path)
    names = []
    for change in ("", "answer = 42"):
        (package / "__init__.py").write_text(change)
        environment.other_vlmeval.cache_clear()
        names.append(environment.versions()["vlmeval"])
    installed_as(tmp_path, "nvidia-vlmeval")
    environment.other_vlmeval.cache_clear()
    names.append(environment.versions()["vlmeval"])
    environment.other_vlmeval.cache_clear()
    assert all(name.startswith("source tree ") for name in names[:2]) and names[0] != names[1]
    assert names[2] == "nvidia-vlmeval 0.2"
