"""Errors that are meant for the person at the command line."""

from __future__ import annotations


class UserError(Exception):
    """One line for the user; the command ends with exit code 2."""
