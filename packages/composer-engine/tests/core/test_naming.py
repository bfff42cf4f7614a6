"""Names that are filled in, and names of runs."""

import pytest

from composer.core import State
from composer.core.naming import fill_in

VALUES = {"run_name": "first", "batch": 7}


class TestFillIn:
    @pytest.mark.parametrize(
        ("template", "expected"),
        [
            ("{run_name}-ba{batch}", "first-ba7"),
            ("ba{batch:05}", "ba00007"),
            ("{run_name!r:>{batch}}", "'first'"),
            ("{{batch}}", "{batch}"),
        ],
    )
    def test_filled_in(self, template, expected):
        """It is what str.format makes of names, formats and conversions."""
        assert fill_in(template, VALUES, "filename") == template.format(**VALUES) == expected

    @pytest.mark.parametrize(
        "template",
        ["{batch.__class__}", "{run_name[0]}", "{epoch}", "{0}", "{}", "{batch:{batch.real}}", "{batch", "{batch:q}"],
    )
    def test_nothing_but_names(self, template):
        """Attributes, indices, positions and other names are refused, and what can be there is named."""
        with pytest.raises(ValueError, match=r"filename may have \{run_name\} and \{batch\} in it, nothing else"):
            fill_in(template, VALUES, "filename")

    @pytest.mark.parametrize("template", ["", "first\0"])
    def test_no_name(self, template):
        """What no file can be called is refused."""
        with pytest.raises(ValueError, match=r"filename must be the name of a file or folder .'\.' is the current one"):
            fill_in(template, VALUES, "filename")

    def test_no_text(self):
        """What is neither a text nor a path is refused by the parameter's name."""
        with pytest.raises(TypeError, match=r"^filename must be a text or a path, got 5"):
            fill_in(5, {"run_name": "run"}, "filename")


class TestRunName:
    @pytest.mark.parametrize("name", ["first", "team/first", "lr=0.1, seed:2", "a..b", "läuft ✓", "c:d"])
    def test_names(self, name):
        """What stays in the folder that it is filled into is taken."""
        assert State(model=None, run_name=name).run_name == name

    @pytest.mark.parametrize(
        "name",
        [
            "",
            "../../x",
            "a/../../x",
            "..",
            "a\\..\\b",
            "/etc/x",
            "\\x",
            "C:\\x",
            "s3://bucket/x",
            "first\0",
            "simplecache::s3://bucket/x",
        ],
    )
    def test_no_names(self, name):
        """What leads elsewhere, or cannot be a folder, is refused."""
        with pytest.raises(ValueError, match="run_name must be a name that folders can have"):
            State(model=None, run_name=name)

    def test_no_text(self):
        """A number is no name."""
        with pytest.raises(TypeError, match="run_name must be a text, got 5"):
            State(model=None, run_name=5)
