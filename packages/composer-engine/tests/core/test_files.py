"""Names of a run's files, and atomic writes."""

import pytest

from composer.core import State, Timestamp
from composer.core.files import check_template, fill_in_run, write_atomically


class TestFillInRun:
    def test_fields_of_the_run(self):
        """The run's name, rank and clock are filled in."""
        state = State(model=None, run_name="mine", rank=3)
        state.timestamp = Timestamp(epoch=2, batch=7)

        name = fill_in_run("{run_name}-ep{epoch}-ba{batch:03d}-{rank}-{total_wct}", state)

        assert name == "mine-ep2-ba007-3-0.0"


class TestCheckTemplate:
    def test_paths_become_strings(self, tmp_path):
        """A path is returned as a string."""
        assert check_template(tmp_path / "{batch}", "filename") == f"{tmp_path}/{{batch}}"

    def test_other_fields_raise(self):
        """An invalid template raises before there is a run."""
        with pytest.raises(ValueError, match=r"filename may have .*nothing else in braces"):
            check_template("{place}", "filename")


class TestWriteAtomically:
    def test_writes(self, tmp_path):
        """Missing folders are created, and only the file is left."""
        path = tmp_path / "new" / "file.json"

        write_atomically(lambda unfinished: unfinished.write_text("x"), path)

        assert [(each.name, each.read_text()) for each in path.parent.iterdir()] == [("file.json", "x")]

    def test_error_preserves_the_previous_file(self, tmp_path):
        """A failed write changes nothing."""
        path = tmp_path / "file.json"
        path.write_text("former")

        def fail(unfinished):
            unfinished.write_text("half")
            raise OSError("disk full")

        with pytest.raises(OSError, match="disk full"):
            write_atomically(fail, path)

        assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("file.json", "former")]
