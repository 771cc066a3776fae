"""docs/coverage.md tells what the installed transformers holds."""

from __future__ import annotations

from mm_capacity.inspection.families import DOCUMENT, document


def test_the_document_is_up_to_date():
    """Fails when a family appears, disappears or changes: write() makes the document anew."""
    assert DOCUMENT.read_text(encoding="utf-8") == document()


def test_the_document_depends_on_what_is_there(monkeypatch):
    from vlm_adapters import coverage

    monkeypatch.setitem(coverage.REFUSED, "aria", "a reason")
    assert "| not supported | a reason |" in document()
