"""Arguments of MosaicML Composer; complete trainings with them are in ``test_saver.py``."""

import pytest

from composer.checkpoint.former import FileLinks, without_suffix, without_zero


def test_suffix():
    """The ending of a file is removed with a warning."""
    with pytest.warns(DeprecationWarning, match=r"'ep1\.pt' is saved as 'ep1'"):
        assert without_suffix("ep1.pt") == "ep1"


@pytest.mark.parametrize(("folder", "number"), [("runs", 1), ("memory://runs", -1)])
def test_zero(folder, number):
    """In place of 0, the last checkpoint of a local folder is kept, and all at a URL."""
    with pytest.warns(DeprecationWarning, match="there are no other copies"):
        assert without_zero(0, folder) == number


def test_links_are_removed(tmp_path):
    """Only links are removed, and only if each checkpoint has one."""
    (tmp_path / "ep1.pt").symlink_to("ep1")
    (tmp_path / "ep2.pt").write_text("mine")
    paths = [str(tmp_path / "ep1"), str(tmp_path / "ep2")]

    FileLinks.of("ep{epoch}", "latest.pt").remove(paths)
    assert (tmp_path / "ep1.pt").is_symlink()

    FileLinks.of("ep{epoch}.pt", "latest").remove(paths)
    assert [path.name for path in tmp_path.iterdir()] == ["ep2.pt"]
