"""The language rules of the library's docstrings and names, and their checker."""

from conftest import ROOT
from language import LIBRARY, TESTS, Finding, check_language


def test_docstrings_and_names_follow_the_rules():
    num_docstrings, findings = check_language(ROOT, (*LIBRARY, *TESTS))
    assert num_docstrings > 2_000
    assert not findings, "\n".join(map(str, findings))


def test_the_checker_finds_fragments_and_vague_names(tmp_path):
    (tmp_path / "t5x_lab").mkdir()
    (tmp_path / "t5x_lab" / "a.py").write_text(
        '"""Of a file."""\n\n\ndef made(of):\n    """Returns x."""\n    self.found, x = 1, 2\n    for one in of:\n        pass\n    return x\n'
    )
    num_docstrings, findings = check_language(tmp_path, ("t5x_lab",))
    assert num_docstrings == 2
    assert Finding("docstring", "t5x_lab/a.py", 1, "Of a file.") in findings
    assert sorted(finding.text for finding in findings if finding.kind == "name") == ["found", "made", "of", "one"]
