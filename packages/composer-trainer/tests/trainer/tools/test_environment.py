"""The environment of a trainer: the name of the run, and MosaicML Composer beside this library."""

import pytest

from composer.trainer.tools.environment import warn_of_mosaicml
from fixtures import small_run


@pytest.fixture
def mosaicml(tmp_path, monkeypatch):
    """Install the metadata of MosaicML Composer."""
    folder = tmp_path / "mosaicml-0.32.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: mosaicml\nVersion: 0.32.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    warn_of_mosaicml.cache_clear()
    yield
    warn_of_mosaicml.cache_clear()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RUN_NAME": "plain"}, "plain"),
        ({"COMPOSER_RUN_NAME": "first"}, "first"),
        ({"RUN_NAME": "plain", "COMPOSER_RUN_NAME": "first"}, "first"),
        ({"RUN_NAME": "plain", "COMPOSER_RUN_NAME": ""}, "plain"),
    ],
)
def test_the_run_name_is_read(monkeypatch, variables, expected):
    """Without run_name, a variable of the environment is the name; an empty one is none."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    trainer = small_run()

    assert trainer.state.run_name == expected


def test_autoresume_uses_the_name_of_the_environment(monkeypatch, tmp_path):
    """A run that is named by the environment resumes by that name."""
    monkeypatch.setenv("COMPOSER_RUN_NAME", "again")
    settings = {"save_folder": str(tmp_path), "autoresume": True}
    first = small_run(max_duration="1ep", **settings)
    first.fit()
    first.close()

    second = small_run(max_duration="2ep", **settings)

    assert second.state.timestamp.epoch == 1


@pytest.mark.usefixtures("mosaicml")
def test_mosaicml_warns_once(recwarn):
    """The first trainer warns of the other distribution, with the commands that repair the installation."""
    small_run()
    small_run()

    (warning,) = recwarn
    assert "mosaicml 0.32.1" in str(warning.message)
    assert "pip uninstall -y mosaicml && pip install --force-reinstall --no-deps" in str(warning.message)
    assert warning.filename.endswith("runs.py")  # the line that calls Trainer()
