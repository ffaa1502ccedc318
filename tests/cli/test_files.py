"""A file is replaced whole or not at all."""

import os

import pytest

from hf_longspec.cli.files import replace_file


def test_a_file_is_replaced_at_once_and_a_link_stays(tmp_path, monkeypatch):
    file, link = tmp_path / "deep" / "file", tmp_path / "link"
    replace_file(file, "old")
    file.chmod(0o640)
    link.symlink_to(file)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            replace_file(link, "new")
    assert file.read_text() == "old" and [path.name for path in file.parent.iterdir()] == ["file"]
    replace_file(link, "new")
    assert file.read_text() == "new" and link.is_symlink() and file.stat().st_mode & 0o777 == 0o640
