"""Which checkpoint is the newest whole one."""

import pytest

from composer.checkpoint import CheckpointError, find_checkpoints, newest_checkpoint, save_checkpoint
from composer.checkpoint.finding import locate


@pytest.fixture
def three(runs, tmp_path):
    """Return a folder with three checkpoints whose names do not sort as their clocks do."""
    for batch in (100, 20, 3):
        save_checkpoint(runs.make(batch=batch), tmp_path / f"ba{batch}")
    return tmp_path


class TestFindCheckpoints:
    def test_sorted_by_clock(self, three):
        """The oldest comes first, by batches and not by name."""
        assert [one.name for one in find_checkpoints(three)] == ["ba3", "ba20", "ba100"]

    def test_reasons(self, three):
        """What is not whole comes first, with the reason."""
        (three / "ba20" / "manifest.json").unlink()
        (three / "notes").mkdir()
        (three / "file").write_text("")

        found = find_checkpoints(three)

        assert [one.name for one in found] == ["ba20", "notes", "ba3", "ba100"]
        assert "ba20/manifest.json is missing" in found[0].problem

    def test_what_is_being_written_is_left_out(self, three):
        """Temporary folders and links are not looked at."""
        (three / "ba20").rename(three / ".ba20.17-0a1b2c3d.tmp")
        (three / "latest").symlink_to("ba100")

        assert [one.name for one in find_checkpoints(three)] == ["ba3", "ba100"]


class TestNewestCheckpoint:
    def test_newest(self, three):
        """The one with the most batches is the newest."""
        assert newest_checkpoint(three).path == str(three / "ba100")

    def test_skipped_with_a_warning(self, three):
        """One whose content has changed is skipped, and the file is named."""
        path = three / "ba100" / "model.safetensors"
        path.write_bytes(bytes(path.stat().st_size))

        with pytest.warns(UserWarning, match=r"Skipped a checkpoint .*ba100/model\.safetensors has been changed"):
            found = newest_checkpoint(three)

        assert found.name == "ba20"

    def test_of_a_run(self, runs, three):
        """Only those of the run that is asked for count."""
        save_checkpoint(runs.make(batch=500, run_name="other"), three / "other")

        assert newest_checkpoint(three, run_name="blur").name == "ba100"
        assert newest_checkpoint(three, run_name="nobody") is None

    def test_weights_alone_are_nothing_to_go_on_with(self, runs, three):
        """A checkpoint of weights is taken only if that is said."""
        save_checkpoint(runs.make(batch=500), three / "weights", weights_only=True)

        assert newest_checkpoint(three).name == "ba100"
        assert newest_checkpoint(three, weights_only=None).name == "weights"

    def test_epochs_end_after_their_last_batch(self, runs, tmp_path):
        """Of two with equal batches the one that has finished its epoch is newer."""
        state = runs.make(batch=5)
        save_checkpoint(state, tmp_path / "b-before")
        state.timestamp = state.timestamp.to_next_epoch()
        save_checkpoint(state, tmp_path / "a-after")

        assert newest_checkpoint(tmp_path).name == "a-after"


class TestLocate:
    def test_links(self, three):
        """A link is followed before its checkpoint is opened."""
        (three / "best").symlink_to("ba20")

        folder, name = locate(three / "best")

        assert folder.at(name) == str(three / "ba20")

    @pytest.mark.parametrize(
        ("target", "reason"),
        [
            ("link", "is a symbolic link that leads to itself"),
            ("nothing", "does not exist"),
            ("file/ep1", "does not exist"),  # its parent is no folder
        ],
    )
    def test_links_without_a_checkpoint(self, tmp_path, target, reason):
        """A link to itself, to nothing or below a file is refused with that reason."""
        (tmp_path / "file").write_text("")
        (tmp_path / "link").symlink_to(target)

        with pytest.raises(CheckpointError, match=rf"link {reason}"):
            locate(tmp_path / "link")
