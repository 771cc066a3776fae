"""The options of a registered policy, told without importing it (which would import torch).

A policy is a dataclass, so its options are the annotated names in its class body and in
those of its bases; they are read from the source files.
"""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from mm_capacity.errors import UserError


@cache
def policy_fields(name: str) -> frozenset[str]:
    """Names of the options of a registered policy.

    Raises:
        UserError: the registry names a file that is not there.
    """
    from mm_capacity.policies import POLICIES

    module, _, attribute = POLICIES[name].partition(":")
    fields = _class_fields(module, attribute)
    if fields is None:
        raise UserError(f"policy {name!r} is registered, but {POLICIES[name]} does not exist")
    return fields


def _class_fields(module: str, name: str) -> frozenset[str] | None:
    spec = find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None  # no such file, or a part of Python itself (ABC)
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    imported: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            package = module.rsplit(".", node.level)[0] + "." if node.level else ""
            imported |= {alias.asname or alias.name: package + node.module for alias in node.names}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            fields = set(_own_fields(node))
            for base in node.bases:
                if isinstance(base, ast.Name):
                    inherited = _class_fields(imported.get(base.id, module), base.id)
                    fields |= inherited or set()
            return frozenset(fields)
    return None


def _own_fields(node: ast.ClassDef) -> list[str]:
    return [
        statement.target.id
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and "ClassVar" not in ast.unparse(statement.annotation)
    ]
